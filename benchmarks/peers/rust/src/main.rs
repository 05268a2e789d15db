//! mscheduler: one consumer without a limit on its tasks. `work` | COUNT PAUSE
use std::env;
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use mongodb::{Client, Collection};
use mscheduler::tasker::consumer::{TaskConsumer, TaskConsumerConfig, TaskConsumerFunc};
use mscheduler::tasker::error::MResult;
use mscheduler::tasker::producer::TaskProducer;
use mscheduler::tasker::task::Task;
use mscheduler::tasker::task_common::ensure_index;

static COUNT: AtomicU64 = AtomicU64::new(0);
/// So many at a time are not lost: each task makes about six events, and a worker that falls 128 of these behind forgets the
/// tasks that they told of, and hears of nothing until the next lease ends (10 s).
const OUTSTANDING: u64 = 12;

fn now_ms() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64() * 1000.0
}

struct Noop {
    delays: String,
}

#[async_trait]
impl TaskConsumerFunc<f64, i32> for Noop {
    async fn consume(&self, sent: Option<f64>) -> MResult<i32> {
        COUNT.fetch_add(1, Ordering::Relaxed);
        if let Some(sent) = sent.filter(|sent| *sent > 0.0) {
            let mut file = OpenOptions::new().create(true).append(true).open(&self.delays).unwrap();
            writeln!(file, "{}", now_ms() - sent).unwrap();
        }
        Ok(0)
    }
}

async fn work(collection: Collection<Task<f64, i32>>, directory: String) {
    let pid = std::process::id();
    let mut shown = File::create(format!("{directory}/{pid}.count")).unwrap();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(Duration::from_millis(10)).await;
            shown.seek(SeekFrom::Start(0)).unwrap();
            shown.write_all(&COUNT.load(Ordering::Relaxed).to_le_bytes()).unwrap();
        }
    });
    let noop = Noop { delays: format!("{directory}/{pid}.delays") };
    let config = TaskConsumerConfig::builder().worker_id(format!("w{pid}")).build();
    let consumer = TaskConsumer::create(collection, noop, config).await.ok().expect("a consumer");
    consumer.start().await;
}

/// How many tasks the workers have run.
fn done(directory: &str) -> u64 {
    let files = std::fs::read_dir(directory).unwrap().flatten().map(|entry| entry.path());
    let counts = files.filter(|path| path.extension().is_some_and(|extension| extension == "count"));
    let read = counts.filter_map(|path| std::fs::read(path).ok()?.get(..8)?.try_into().ok());
    read.map(u64::from_le_bytes).sum()
}

async fn publish(collection: Collection<Task<f64, i32>>, count: u64, pause: f64) {
    let producer = TaskProducer::create(collection).ok().expect("a producer");
    let prefix = now_ms();
    let directory = env::var("TALLY_DIR").unwrap();
    for i in 0..count {
        while pause == 0.0 && i >= done(&directory) + OUTSTANDING {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let sent = if pause > 0.0 { now_ms() } else { 0.0 };
        let _ = producer.send_task(format!("{prefix}-{i}"), sent, None).await;
        if pause > 0.0 {
            tokio::time::sleep(Duration::from_secs_f64(pause)).await;
        }
    }
}

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = env::args().collect();
    let client = Client::with_uri_str(env::var("BROKER_URL").unwrap()).await.unwrap();
    let collection = client.database("bench").collection("mscheduler");
    ensure_index(&collection).await;
    if arguments[1] == "work" {
        work(collection, env::var("TALLY_DIR").unwrap()).await;
    } else {
        publish(collection, arguments[1].parse().unwrap(), arguments[2].parse().unwrap()).await;
    }
}
