// Asynq: concurrency 200, no retention. `work` | COUNT PAUSE
package main

import (
	"bench/tally"
	"context"
	"encoding/json"
	"os"
	"sync"
	"time"

	"github.com/hibiken/asynq"
)

func main() {
	options, err := asynq.ParseRedisURI(os.Getenv("BROKER_URL"))
	if err != nil {
		panic(err)
	}
	if os.Args[1] == "work" {
		tally.Start()
		server := asynq.NewServer(options, asynq.Config{Concurrency: 200, LogLevel: asynq.ErrorLevel})
		mux := asynq.NewServeMux()
		mux.HandleFunc("noop", func(_ context.Context, task *asynq.Task) error {
			var sent float64
			json.Unmarshal(task.Payload(), &sent)
			tally.Done(sent)
			return nil
		})
		if err := server.Run(mux); err != nil {
			panic(err)
		}
		return
	}
	client := asynq.NewClient(options)
	defer client.Close()
	number, pause := tally.Publishing()
	if pause > 0 {
		for range number {
			payload, _ := json.Marshal(tally.NowMs())
			client.Enqueue(asynq.NewTask("noop", payload))
			time.Sleep(pause)
		}
		return
	}
	var lanes sync.WaitGroup
	for range 32 {
		lanes.Add(1)
		go func() {
			defer lanes.Done()
			for range number / 32 {
				client.Enqueue(asynq.NewTask("noop", []byte("0")))
			}
		}()
	}
	lanes.Wait()
	for range number % 32 {
		client.Enqueue(asynq.NewTask("noop", []byte("0")))
	}
}
