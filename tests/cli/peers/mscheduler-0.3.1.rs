//! Writes one task of each kind with mscheduler 0.3.1, lets its consumer run two of them, and prints the collection in relaxed
//! Extended JSON: BROKER_URL=mongodb://… cargo run > mscheduler-0.3.1.json
//! (async-trait 0.1, futures 0.3, mongodb 3, tokio 1 with all features, mscheduler =0.3.1)
use std::env;
use std::time::Duration;

use async_trait::async_trait;
use mongodb::bson::{Bson, DateTime, Document};
use mongodb::{Client, Collection};
use mscheduler::tasker::consumer::{TaskConsumer, TaskConsumerConfig, TaskConsumerFunc};
use mscheduler::tasker::error::{MResult, MSchedulerError};
use mscheduler::tasker::producer::{SendTaskOption, TaskProducer};
use mscheduler::tasker::task::Task;
use mscheduler::tasker::task_common::ensure_index;

struct Handler;

#[async_trait]
impl TaskConsumerFunc<String, i32> for Handler {
    async fn consume(&self, path: Option<String>) -> MResult<i32> {
        if path.as_deref() == Some("boom") {
            return Err(MSchedulerError::ExecutionError(Box::new("boom")));
        }
        Ok(1)
    }
}

#[tokio::main]
async fn main() {
    let client = Client::with_uri_str(env::var("BROKER_URL").unwrap()).await.unwrap();
    let collection: Collection<Task<String, i32>> = client.database("capture").collection("mscheduler");
    collection.drop().await.unwrap();
    ensure_index(&collection).await;
    let producer = TaskProducer::create(collection.clone()).ok().unwrap();
    for (key, path) in [("done", "ok"), ("failed once", "boom")] {
        let _ = producer.send_task(key, path.to_string(), None).await;
    }
    let working = tokio::spawn({
        let collection = collection.clone();
        async move {
            let config = TaskConsumerConfig::builder().worker_id("w1".to_string()).build();
            let consumer = TaskConsumer::create(collection, Handler, config).await.ok().unwrap();
            consumer.start().await;
        }
    });
    tokio::time::sleep(Duration::from_secs(5)).await;
    working.abort();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let later = SendTaskOption::builder().run_time(Some(DateTime::parse_rfc3339_str("2100-01-01T00:00:00Z").unwrap())).build();
    let tuned = SendTaskOption::builder()
        .concurrency_cnt(2u32)
        .specific_worker_ids(vec!["w1".to_string(), "w2".to_string()])
        .ping_interval_ms(1_000u32)
        .worker_timeout_ms(5_000u32)
        .build();
    for (key, option) in [("plain", None), ("later", Some(later)), ("tuned", Some(tuned)), ("live", None)] {
        let _ = producer.send_task(key, "a.png".to_string(), option).await;
    }
    let mut cursor = client.database("capture").collection::<Document>("mscheduler").find(Document::new()).await.unwrap();
    let mut found = vec![];
    while cursor.advance().await.unwrap() {
        found.push(Bson::Document(cursor.deserialize_current().unwrap()));
    }
    println!("{}", Bson::Array(found).into_relaxed_extjson());
}
