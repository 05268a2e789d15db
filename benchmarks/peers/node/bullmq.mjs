// BullMQ: concurrency 200, finished jobs removed. `work` | COUNT PAUSE
import { Queue, Worker } from 'bullmq';
import { brokerUrl, done, sleep } from './tally.mjs';

const url = new URL(brokerUrl);
const connection = { host: url.hostname, port: Number(url.port), maxRetriesPerRequest: null };
const options = { removeOnComplete: true, removeOnFail: true };

if (process.argv[2] === 'work') {
  const worker = new Worker('bench', async (job) => done(job.data.sent), { connection, concurrency: 200, ...options });
  worker.on('error', (error) => console.error(error));
} else {
  const [count, pause] = process.argv.slice(2).map(Number);
  const queue = new Queue('bench', { connection, defaultJobOptions: options });
  for (let start = 0; start < count; start += 500) {
    const number = Math.min(500, count - start);
    if (pause) {
      for (let i = 0; i < number; i += 1) {
        await queue.add('noop', { sent: Date.now() });
        await sleep(pause);
      }
    } else {
      await queue.addBulk(Array.from({ length: number }, () => ({ name: 'noop', data: {} })));
    }
  }
  await queue.close();
}
