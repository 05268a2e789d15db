"""What publishes tasks without anybody's call: `schedules`, changes of users' collections (`data_changes`), and `loops`."""
