"""Who publishes and waits: definitions, publishing, results, events, schedules."""
