// Publishes taskmesh tasks from Node, waits for their results, and signals them. The rules are docs/protocol.md: a task is
// published by an insert that says no more than its publisher knows; a worker accepts it and fills in the rest.
import { randomUUID } from 'node:crypto';
import { BSON, Collection, Document, MongoBulkWriteError, MongoClient, Timestamp } from 'mongodb';

/** What a publisher may set of a task; what it leaves out is as the workers have registered it for the task's name. */
export interface Configuration {
  queue?: string;
  group?: string;
  tags?: readonly string[];
  /** Labels that a worker must have. */
  needs?: Readonly<Record<string, unknown>>;
  /** Not before; or, instead of it, not before so long after the insert. */
  start_time?: Date;
  delay_ms?: number;
  /** What has not started by then becomes EXPIRED. */
  expire_time?: Date;
  priority?: number;
  concurrent_worker_cnt?: number;
  specific_worker_ids?: readonly string[];
  ping_interval_ms?: number;
  worker_timeout_ms?: number;
  max_unexpected_retries?: number;
  unexpected_retry_delay_ms?: number;
  unexpected_retry_delay_scope?: 'task' | 'worker';
  unexpected_retry_backoff?: number;
  unexpected_retry_jitter?: number;
  max_timeouts?: number;
  run_timeout_ms?: number | null;
  retain_success_ms?: number | null;
  retain_failed_ms?: number | null;
  on_fail?: string | null;
}

export class TaskMeshError extends Error {
  constructor(message: string) {
    super(message);
    this.name = new.target.name;
  }
}
/** The task has FAILed. `reasons`: why, one text for each failed execution. */
export class TaskError extends TaskMeshError {
  constructor(message: string, readonly reasons: readonly string[]) {
    super(message);
  }
}
export class TaskCancelled extends TaskMeshError {}
export class TaskExpired extends TaskMeshError {}
/** There is no such task, or no more: it was deleted, or is past its retention. */
export class TaskNotFound extends TaskMeshError {}
/** The task is finished, so that a signal would reach nobody. */
export class TaskFinished extends TaskMeshError {}
export class TooManySignals extends TaskMeshError {}
/** The task has not finished within the time that its waiter gave it. */
export class ResultTimeout extends TaskMeshError {}

const DUPLICATE_KEY = 11000;
const PER_COMMAND = 1000;
const LOOK_EVERY_MS = 100;
const MAX_SIGNALS = 1000;
const MAX_SIGNALS_BYTES = 1_000_000;
const SIZE_OF_A_SIGNAL = 100;
const MAJORITY = { w: 'majority' } as const;

type Task = Document & { _id: string };
type Waiter = (task: Task | undefined, error?: unknown) => void;

/** A published task. `created`: whether this call has inserted it; else its key was there already, and nothing was changed. */
export class TaskHandle<R = unknown> {
  constructor(
    private readonly mesh: TaskMesh,
    readonly taskName: string,
    readonly key: string,
    readonly created: boolean,
  ) {}

  /** Waits for the task, as `TaskMesh.result` does. */
  result(timeoutMs?: number): Promise<R> {
    return this.mesh.result<R>(this.taskName, this.key, timeoutMs);
  }

  /** Signals the task, as `TaskMesh.signal` does. */
  signal(event: string, payload?: unknown, signalId?: string): Promise<void> {
    return this.mesh.signal(this.taskName, this.key, event, payload, signalId);
  }
}

/** The tasks of one collection. The client stays its owner's: close it when no more results are waited for. */
export class TaskMesh {
  readonly tasks: Collection<Task>;
  readonly #waiters = new Map<string, Set<Waiter>>();
  #looking = false;

  constructor(client: MongoClient, { database = 'taskmesh', collection = 'tasks' } = {}) {
    this.tasks = client.db(database).collection<Task>(collection, { readConcern: { level: 'majority' } });
  }

  /** Publishes a task, once for its key however often it is called. `fields`: your own, at the top of the document. */
  async publish<R = unknown>(name: string, key: string, params: Document = {}, configuration: Configuration = {}, fields: Document = {}): Promise<TaskHandle<R>> {
    const [handle] = await this.publishMany<R>(name, [[key, params]], configuration, fields);
    return handle!;
  }

  /** Publishes many tasks of one name (pairs of key and params, a Map for example), a thousand in a round trip. */
  async publishMany<R = unknown>(name: string, paramsByKey: Iterable<readonly [string, Document]>, configuration: Configuration = {}, fields: Document = {}): Promise<TaskHandle<R>[]> {
    const inserted = [...paramsByKey].map(([key, params]): Task => ({
      ...fields, _id: `${name}:${key}`, name, key, params, configuration, status: 'INIT',
      publish_time: new Timestamp({ t: 0, i: 0 }), // the server fills it in
    }));
    const handles: TaskHandle<R>[] = [];
    for (let start = 0; start < inserted.length; start += PER_COMMAND) {
      const part = inserted.slice(start, start + PER_COMMAND);
      const taken = await this.#insert(part);
      handles.push(...part.map((task, place) => new TaskHandle<R>(this, name, task['key'] as string, !taken.has(place))));
    }
    return handles;
  }

  /** Inserts tasks, and returns the places of those whose key was there already. */
  async #insert(tasks: Task[]): Promise<Set<number>> {
    const taken = await this.#duplicates(tasks);
    if (taken.length === 0) return new Set();
    const ids = taken.map((place) => tasks[place]!._id);
    // What is past its retention is gone for everybody; the server is about to remove it.
    const past = { _id: { $in: ids }, delete_time: { $type: 'date' }, $expr: { $lte: ['$delete_time', '$$NOW'] } } as const;
    const { deletedCount } = await this.tasks.deleteMany(past, { writeConcern: MAJORITY });
    const again = taken.map((place) => tasks[place]!);
    const left = deletedCount === 0 ? taken : (await this.#duplicates(again)).map((place) => taken[place]!);
    const deleted = await this.tasks.findOne({ _id: { $in: left.map((place) => tasks[place]!._id) }, status: 'DELETED' });
    if (deleted) throw new TaskMeshError(`${deleted._id} was deleted while a handler was at work: publish it again in a minute`);
    return new Set(left);
  }

  async #duplicates(tasks: Task[]): Promise<number[]> {
    try {
      await this.tasks.insertMany(tasks, { ordered: false, writeConcern: MAJORITY, ignoreUndefined: true });
      return [];
    } catch (error) {
      if (!(error instanceof MongoBulkWriteError)) throw error;
      const failed = [error.writeErrors].flat();
      const others = failed.some(({ code }) => code !== DUPLICATE_KEY) || error.result.getWriteConcernError() !== undefined;
      if (others || failed.length === 0) throw error;
      return failed.map(({ index }) => index);
    }
  }

  /**
   * Waits until the task is finished, and returns the value of its first SUCCESS.
   *
   * Throws TaskError if it FAILs, TaskCancelled, TaskExpired, TaskNotFound, and ResultTimeout after `timeoutMs` (without one it
   * waits for ever). All waiters of a mesh share one look at the database each tenth of a second.
   */
  async result<R = unknown>(name: string, key: string, timeoutMs?: number): Promise<R> {
    const id = `${name}:${key}`;
    const task = await this.#finished(id, timeoutMs);
    if (!task) throw new TaskNotFound(`there is no task ${id} (any more): it was deleted, or is past its retention`);
    const entries = (task['task_state']?.worker_states ?? []) as Document[];
    if (task['status'] === 'SUCCESS') {
      const done = entries.filter((entry) => entry['state'] === 'SUCCESS');
      done.sort((a, b) => Number(a['success_time']) - Number(b['success_time']));
      return (done[0]?.['returns'] ?? null) as R;
    }
    if (task['status'] === 'CANCELLED') throw new TaskCancelled(`task ${id} was cancelled`);
    if (task['status'] === 'EXPIRED') throw new TaskExpired(`task ${id} had not started by its expire_time`);
    const reasons = entries.filter((entry) => entry['state'] === 'FAIL').map((entry) => String(entry['fail_reason']));
    const dependency = task['task_state']?.dependency_failure?.reason as string | undefined;
    if (dependency) reasons.push(dependency);
    throw new TaskError(`task ${id} failed: ${reasons.at(-1) ?? 'its executions were lost'}`, reasons);
  }

  #finished(id: string, timeoutMs: number | undefined): Promise<Task | undefined> {
    return new Promise((resolve, reject) => {
      const waiters = this.#waiters.get(id) ?? new Set();
      const told: Waiter = (task, error) => {
        clearTimeout(timer);
        waiters.delete(told);
        if (waiters.size === 0) this.#waiters.delete(id);
        error === undefined ? resolve(task) : reject(error);
      };
      const timer = timeoutMs === undefined ? undefined
        : setTimeout(() => told(undefined, new ResultTimeout(`task ${id} has not finished within ${timeoutMs} ms`)), timeoutMs);
      this.#waiters.set(id, waiters.add(told));
      if (!this.#looking) void this.#look();
    });
  }

  /** Looks at all that is waited for, until nothing is. */
  async #look(): Promise<void> {
    this.#looking = true;
    while (this.#waiters.size > 0) {
      const ids = [...this.#waiters.keys()];
      try {
        for (let start = 0; start < ids.length; start += PER_COMMAND) await this.#lookAt(ids.slice(start, start + PER_COMMAND));
      } catch (error) {
        for (const id of ids) this.#tell(id, undefined, error);
      }
      await new Promise((resolve) => setTimeout(resolve, LOOK_EVERY_MS));
    }
    this.#looking = false;
  }

  async #lookAt(ids: string[]): Promise<void> {
    const found = await this.tasks.find({ _id: { $in: ids } }, { projection: { status: 1 } }).toArray();
    const open = new Set(found.filter(({ status }) => status === 'INIT' || status === 'RUNNING').map(({ _id }) => _id));
    const ended = ids.filter((id) => !open.has(id));
    if (ended.length === 0) return;
    const fields = { status: 1, 'task_state.worker_states': 1, 'task_state.dependency_failure': 1 };
    const tasks = await this.tasks.find({ _id: { $in: ended }, status: { $ne: 'DELETED' } }, { projection: fields }).toArray();
    const byId = new Map(tasks.map((task) => [task._id, task]));
    for (const id of ended) this.#tell(id, byId.get(id));
  }

  #tell(id: string, task: Task | undefined, error?: unknown): void {
    for (const waiter of [...(this.#waiters.get(id) ?? [])]) waiter(task, error);
  }

  /**
   * Tells a task that something has happened, for its handler's `wait_for(event)`. With a `signalId` it may be sent again: what is
   * known already is sent once. Throws TaskFinished, TaskNotFound, TooManySignals.
   */
  async signal(name: string, key: string, event: string, payload: unknown = {}, signalId: string = randomUUID()): Promise<void> {
    if (payload === null) throw new TaskMeshError(`signal ${event}: a payload of null would be taken for a timeout: send false`);
    const id = `${name}:${key}`;
    const size = BSON.calculateObjectSize({ payload }) + Buffer.byteLength(event) + SIZE_OF_A_SIGNAL;
    const signals = { $ifNull: ['$task_state.signals', []] };
    const bytes = { $add: [{ $ifNull: ['$task_state.signals_bytes', 0] }, size] };
    const awaited = { $and: [
      { $gt: ['$task_state.suspended_until', '$$NOW'] },
      { $eq: ['$task_state.suspended_for.event', { $literal: event }] },
    ] };
    const sent = { $mergeObjects: [{ $literal: { event, id: signalId, payload, size } }, { time: '$$NOW' }] };
    const { matchedCount } = await this.tasks.updateOne(
      {
        _id: id,
        status: { $in: ['INIT', 'RUNNING'] },
        'task_state.signals.id': { $ne: signalId },
        'task_state.steps.signal_id': { $ne: signalId },
        $expr: { $and: [{ $lt: [{ $size: signals }, MAX_SIGNALS] }, { $lte: [bytes, MAX_SIGNALS_BYTES] }] },
      },
      [{ $set: {
        'task_state.signals': { $concatArrays: [signals, [sent]] },
        'task_state.signals_bytes': bytes,
        'task_state.suspended_until': { $cond: [awaited, '$$NOW', { $ifNull: ['$task_state.suspended_until', '$$REMOVE'] }] },
        next_claim_time: { $cond: [awaited, '$$NOW', { $ifNull: ['$next_claim_time', '$$REMOVE'] }] },
        event: { $concat: ['signalled\x1f', { $toString: { $toLong: '$$NOW' } }, '\x1f'] },
      } }],
      { writeConcern: MAJORITY },
    );
    if (matchedCount > 0) return;
    const fields = { status: 1, 'task_state.signals.id': 1, 'task_state.steps.signal_id': 1 };
    const task = await this.tasks.findOne({ _id: id, status: { $ne: 'DELETED' } }, { projection: fields });
    if (!task) throw new TaskNotFound(`there is no task ${id} (any more): it was deleted, or is past its retention`);
    const { signals: waiting = [], steps = [] } = (task['task_state'] ?? {}) as { signals?: Document[]; steps?: Document[] };
    if (waiting.some((each) => each['id'] === signalId) || steps.some((each) => each['signal_id'] === signalId)) return;
    if (task['status'] !== 'INIT' && task['status'] !== 'RUNNING') throw new TaskFinished(`task ${id} is finished (${task['status']})`);
    throw new TooManySignals(`task ${id} has as many signals that nobody has waited for as are kept: send ${event} again later`);
  }
}
