// Writes one job of each kind with Agenda 6.2.6 (@agendajs/mongo-backend 4.0.3, mongodb 7.8.0), runs what is due, and prints
// the collection in relaxed Extended JSON: BROKER_URL=mongodb://… node agenda-6.2.6.mjs > agenda-6.2.6.json
import { MongoBackend } from '@agendajs/mongo-backend';
import { Agenda } from 'agenda';
import { MongoClient, BSON } from 'mongodb';

const uri = process.env.BROKER_URL;
const backend = new MongoBackend({ address: uri.replace('/?', '/agenda?'), ensureIndex: true });
const agenda = new Agenda({ backend, processEvery: 100, defaultLockLifetime: 600_000 });
agenda.on('error', (error) => console.error(error));
await agenda.ready;
let hang;
agenda.define('send email', async () => {});
agenda.define('explode', async () => { throw new Error('boom'); });
agenda.define('hang', () => new Promise((resolve) => { hang = resolve; }));
agenda.define('report', async () => {});
agenda.define('never', async () => {});
await agenda.now('send email', { to: 'done@example.com' });
await agenda.now('explode', { n: 1 });
await agenda.now('hang', { n: 2 });
await agenda.every('5 minutes', 'report', { kind: 'short' });
await agenda.start();
await new Promise((resolve) => setTimeout(resolve, 4000));
await agenda.schedule(new Date('2100-01-02T03:04:05Z'), 'send email', { to: 'later@example.com', n: 1 });
await agenda.create('send email', { to: 'urgent@example.com' }).priority('high').schedule(new Date('2100-01-01T00:00:00Z')).save();
await agenda.create('send email', { to: 'unique@example.com' }).unique({ 'data.to': 'unique@example.com' }).schedule(new Date('2100-01-01T00:00:00Z')).save();
await agenda.every('0 3 * * *', 'clean up', { days: 30 }, { timezone: 'Europe/Berlin', skipImmediate: true });
await agenda.every(90000, 'poll', undefined, { skipImmediate: true });
const at = agenda.create('at', {}); at.repeatAt('3:30pm'); await at.save();
const off = agenda.create('send email', { to: 'off@example.com' }); off.schedule(new Date('2100-01-01T00:00:00Z')); off.disable(); await off.save();
const client = await MongoClient.connect(uri);
const jobs = await client.db('agenda').collection('agendaJobs').find().sort({ _id: 1 }).toArray();
console.log(BSON.EJSON.stringify(jobs, null, 1, { relaxed: true }));
process.exit(0);
