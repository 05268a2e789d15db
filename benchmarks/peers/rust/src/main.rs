//! mscheduler: one consumer without a limit on its tasks. `work` | COUNT PAUSE
use std::env;
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use mongodb::{Client, Collection};
use mscheduler::tasker::consumer::{TaskConsumer, TaskConsumerConfig, TaskConsumerFunc};
use mscheduler::tasker::error::MResult;
use mscheduler::tasker::producer::TaskProducer;
use mscheduler::tasker::task::Task;
use mscheduler::tasker::task_common::ensure_index;

static COUNT: AtomicU64 = AtomicU64::new(0);

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
    // It ends whenever one of its loops falls more than 128 of its own events behind, as a look through all tasks
    // makes it do. Whoever runs it has to start it again; then it goes on with what it finds.
    loop {
        consumer.start().await;
    }
}

async fn publish(collection: Collection<Task<f64, i32>>, count: u64, pause: f64) {
    let producer = Arc::new(TaskProducer::create(collection).ok().expect("a producer"));
    let prefix = now_ms();
    // One by one: when keys come faster it loses some of them, or panics (its channel holds 128 events).
    let lanes: u64 = env::var("PEER_LANES").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
    let lanes = if pause > 0.0 { 1 } else { lanes };
    let mut tasks = Vec::new();
    for lane in 0..lanes {
        let producer = producer.clone();
        tasks.push(tokio::spawn(async move {
            for i in (lane..count).step_by(lanes as usize) {
                let sent = if pause > 0.0 { now_ms() } else { 0.0 };
                let _ = producer.send_task(format!("{prefix}-{i}"), sent, None).await;
                if pause > 0.0 {
                    tokio::time::sleep(Duration::from_secs_f64(pause)).await;
                }
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
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
