// Agenda: polls every 100 ms, 500 jobs at once, finished jobs removed; with CHANNEL it is told of jobs by a change stream, too.
// `work` | COUNT PAUSE
import { MongoBackend, MongoChangeStreamNotificationChannel, MongoClient } from '@agendajs/mongo-backend';
import { Agenda } from 'agenda';
import { brokerUrl, done, sleep } from './tally.mjs';

const db = (await MongoClient.connect(brokerUrl)).db();
const agenda = new Agenda({
  backend: new MongoBackend({ mongo: db, ensureIndex: true }),
  ...(process.env.CHANNEL && { notificationChannel: new MongoChangeStreamNotificationChannel({ db }) }),
  processEvery: 100,
  maxConcurrency: 500,
  defaultConcurrency: 500,
  defaultLockLimit: 0,
  lockLimit: 0,
  removeOnComplete: true,
});
agenda.on('error', (error) => console.error(error));
agenda.define('noop', async (job) => done(job.attrs.data.sent), { concurrency: 500, lockLimit: 0 });

if (process.argv[2] === 'work') {
  await agenda.start();
} else {
  const [count, pause] = process.argv.slice(2).map(Number);
  await agenda.ready;
  for (let start = 0; start < count; start += 50) {
    const number = Math.min(50, count - start);
    if (pause) {
      for (let i = 0; i < number; i += 1) {
        await agenda.now('noop', { sent: Date.now() });
        await sleep(pause);
      }
    } else {
      await Promise.all(Array.from({ length: number }, () => agenda.now('noop', {})));
    }
  }
  process.exit(0);
}
