// Package tally counts what the handlers of this process did: a number in a file, and publish → start delays.
package tally

import (
	"encoding/binary"
	"fmt"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

var (
	count  atomic.Uint64
	delays sync.Mutex
)

// NowMs is the wall clock.
func NowMs() float64 { return float64(time.Now().UnixNano()) / 1e6 }

// Start begins to show the count.
func Start() {
	file, err := os.Create(fmt.Sprintf("%s/%d.count", os.Getenv("TALLY_DIR"), os.Getpid()))
	if err != nil {
		panic(err)
	}
	go func() {
		shown := make([]byte, 8)
		for range time.Tick(10 * time.Millisecond) {
			binary.LittleEndian.PutUint64(shown, count.Load())
			file.WriteAt(shown, 0)
		}
	}()
}

// Done counts one task.
func Done(sent float64) {
	count.Add(1)
	if sent == 0 {
		return
	}
	delays.Lock()
	defer delays.Unlock()
	path := fmt.Sprintf("%s/%d.delays", os.Getenv("TALLY_DIR"), os.Getpid())
	file, _ := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	fmt.Fprintln(file, NowMs()-sent)
	file.Close()
}

// Publishing returns how many to publish and the pause between two.
func Publishing() (int, time.Duration) {
	number, _ := strconv.Atoi(os.Args[1])
	pause, _ := strconv.ParseFloat(os.Args[2], 64)
	return number, time.Duration(pause * float64(time.Second))
}
