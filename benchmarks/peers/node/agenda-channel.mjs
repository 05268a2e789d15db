// Agenda with its MongoChangeStreamNotificationChannel: see agenda.mjs.
process.env.CHANNEL = '1';
await import('./agenda.mjs');
