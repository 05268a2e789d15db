// River: PostgreSQL, 500 workers, fetches every 2 ms at most (its own benchmark's settings). `work` | COUNT PAUSE
package main

import (
	"bench/tally"
	"context"
	"log/slog"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

type args struct {
	Sent float64 `json:"sent"`
}

func (args) Kind() string { return "noop" }

type worker struct {
	river.WorkerDefaults[args]
}

func (worker) Work(_ context.Context, job *river.Job[args]) error {
	tally.Done(job.Args.Sent)
	return nil
}

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func main() {
	ctx := context.Background()
	config := must(pgxpool.ParseConfig(os.Getenv("BROKER_URL")))
	config.MaxConns = 20
	pool := must(pgxpool.NewWithConfig(ctx, config))
	driver := riverpgxv5.New(pool)
	workers := river.NewWorkers()
	river.AddWorker(workers, &worker{})
	settings := &river.Config{
		FetchCooldown:     2 * time.Millisecond,
		FetchPollInterval: 20 * time.Millisecond,
		Logger:            slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError})),
		Queues:            map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 500}},
		Workers:           workers,
	}
	if os.Args[1] == "work" {
		tally.Start()
		client := must(river.NewClient(driver, settings))
		if err := client.Start(ctx); err != nil {
			panic(err)
		}
		select {}
	}
	must(must(rivermigrate.New(driver, nil)).Migrate(ctx, rivermigrate.DirectionUp, nil))
	client := must(river.NewClient(driver, &river.Config{Workers: workers}))
	number, pause := tally.Publishing()
	if pause > 0 {
		for range number {
			must[any](client.Insert(ctx, args{Sent: tally.NowMs()}, nil))
			time.Sleep(pause)
		}
		return
	}
	for number > 0 {
		batch := make([]river.InsertManyParams, min(number, 2000))
		for i := range batch {
			batch[i] = river.InsertManyParams{Args: args{}}
		}
		must[any](client.InsertManyFast(ctx, batch))
		number -= len(batch)
	}
	_ = pgx.ErrNoRows
}
