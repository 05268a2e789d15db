// Counts what the handlers of this process did: a number in a file, and publish → start delays.
import fs from 'node:fs';

const directory = process.env.TALLY_DIR;
const file = fs.openSync(`${directory}/${process.pid}.count`, 'w');
const shown = Buffer.alloc(8);
let count = 0;
let written = -1;

setInterval(() => {
  if (count === written) return;
  written = count;
  shown.writeBigUInt64LE(BigInt(count));
  fs.writeSync(file, shown, 0, 8, 0);
}, 10).unref();

export function done(sent) {
  count += 1;
  if (sent) fs.appendFileSync(`${directory}/${process.pid}.delays`, `${Date.now() - sent}\n`);
}

export const brokerUrl = process.env.BROKER_URL;
export const sleep = (seconds) => new Promise((resolve) => setTimeout(resolve, seconds * 1000));
