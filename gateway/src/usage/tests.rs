use super::*;
use scheduler_core::hubs::Hubs;
use std::fs;
use std::path::PathBuf;

const DAY: UsageDay = UsageDay(20_000);

fn open(dir: &Path) -> Arc<UsageRecorder> {
    let catalogue = Arc::new(Catalogue::builtin());
    Arc::new(UsageRecorder::open(&dir.join("routes"), &"aws/us-east-1".parse().unwrap(), &catalogue))
}

fn count(recorder: &UsageRecorder, day: UsageDay, requests: u64) {
    let region = recorder.catalogue.index_of(&"aws/us-east-1".parse().unwrap()).unwrap();
    let counts = UsageCounts { requests, inputs: 0, tokens: 0 };
    recorder.count(day, &"acme".parse().unwrap(), &"minilm".parse().unwrap(), region, counts);
}

async fn write(recorder: &Arc<UsageRecorder>, today: UsageDay) {
    recorder.with_ledgers(move |recorder, ledgers| ledgers.write(recorder, today)).await;
}

/// Returns the names of the files of ledgers.
fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = entries.map(|name| name.into_string().unwrap()).collect();
    names.retain(|name| name.starts_with("routes.usage-"));
    names.sort();
    names
}

/// Returns the files of days.
fn days(dir: &Path) -> Vec<PathBuf> {
    names(dir).iter().filter(|name| !name.ends_with(".lock")).map(|name| dir.join(name)).collect()
}

/// Returns the requests in the files of days.
fn requests(dir: &Path) -> Vec<u64> {
    let read = |path: PathBuf| serde_json::from_slice::<UsageV1>(&fs::read(path).unwrap()).unwrap();
    days(dir).into_iter().map(read).map(|day| day.rows.iter().map(|row| row.counts.requests).sum()).collect()
}

#[tokio::test]
async fn a_process_continues_the_ledger_of_one_that_was_killed_after_its_last_write() {
    let dir = tempfile::tempdir().unwrap();
    let first = open(dir.path());
    count(&first, DAY, 5);
    write(&first, DAY).await;
    count(&first, DAY, 7);
    // The lock ends with the process, and the last counts were only in its memory.
    drop(first);
    let second = open(dir.path());
    count(&second, DAY, 1);
    write(&second, DAY).await;
    assert_eq!(requests(dir.path()), [6]);
}

#[tokio::test]
async fn two_processes_count_in_ledgers_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let (old, new) = (open(dir.path()), open(dir.path()));
    count(&old, DAY, 2);
    count(&new, DAY, 3);
    write(&old, DAY).await;
    write(&new, DAY).await;
    let mut both = requests(dir.path());
    both.sort();
    assert_eq!(both, [2, 3]);
    let third = open(dir.path());
    assert!(third.ledgers.lock().former.is_empty(), "both are in use");
    drop((old, new, third));
    let next = open(dir.path());
    assert_eq!(next.ledgers.lock().former.len(), 1, "one is continued, and the other one is reported");
    assert_eq!(next.ledgers.lock().unreported().len(), 2);
}

#[tokio::test]
async fn a_write_that_failed_is_made_up_for_by_the_next() {
    let (dir, missing) = (tempfile::tempdir().unwrap(), "missing");
    let recorder = open(&dir.path().join(missing));
    count(&recorder, DAY, 4);
    write(&recorder, DAY).await;
    assert_eq!(recorder.counts.write_failures.get(), 1);
    assert_eq!(recorder.ledgers.lock().unreported(), [], "it is not on disk");
    fs::create_dir(dir.path().join(missing)).unwrap();
    write(&recorder, DAY).await;
    assert_eq!(requests(&dir.path().join(missing)), [4], "without a new request");
    assert_eq!(names(&dir.path().join(missing)).len(), 2, "the file is locked");
    let other = open(&dir.path().join(missing));
    assert_eq!(other.ledgers.lock().unreported(), [], "another process does not take it");
}

#[tokio::test]
async fn requests_count_while_the_ledger_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let recorder = open(dir.path());
    let ledgers = recorder.ledgers.lock();
    count(&recorder, DAY, 1);
    assert_eq!(recorder.state().rows, 0, "the metrics do not wait either");
    drop(ledgers);
    write(&recorder, DAY).await;
    assert_eq!((requests(dir.path()), recorder.state().rows), (vec![1], 1));
}

#[tokio::test]
async fn a_write_whose_task_is_cancelled_is_completed() {
    let dir = tempfile::tempdir().unwrap();
    let recorder = open(dir.path());
    count(&recorder, DAY, 1);
    let (entered, has_entered) = std::sync::mpsc::channel();
    let (resume, is_resumed) = std::sync::mpsc::channel::<()>();
    let writing = recorder.clone();
    let task = tokio::spawn(async move {
        let write = move |recorder: &UsageRecorder, ledgers: &mut Ledgers| {
            entered.send(()).unwrap();
            is_resumed.recv().unwrap();
            ledgers.write(recorder, DAY);
        };
        writing.with_ledgers(write).await;
    });
    tokio::task::spawn_blocking(move || has_entered.recv().unwrap()).await.unwrap();
    task.abort();
    assert!(task.await.unwrap_err().is_cancelled());
    count(&recorder, DAY, 2);
    resume.send(()).unwrap();
    write(&recorder, DAY).await;
    assert_eq!(requests(dir.path()), [3]);
}

#[tokio::test]
async fn an_unreadable_file_is_left_alone_and_nothing_counts_in_its_ledger() {
    let dir = tempfile::tempdir().unwrap();
    let first = open(dir.path());
    count(&first, DAY, 1);
    count(&first, UsageDay(DAY.0 + 1), 2);
    write(&first, DAY).await;
    drop(first);
    let [damaged, _] = &days(dir.path())[..] else { panic!("two days") };
    fs::write(damaged, "{").unwrap();
    fs::write(dir.path().join("routes.usage-other"), "{").unwrap();
    let recorder = open(dir.path());
    count(&recorder, DAY, 4);
    write(&recorder, DAY).await;
    assert_eq!(fs::read_to_string(damaged).unwrap(), "{");
    let unreported = recorder.ledgers.lock().unreported();
    let days: Vec<_> = unreported.iter().map(|(_, day)| *day).collect();
    assert_eq!(days, [DAY, UsageDay(DAY.0 + 1)], "the new one, and the valid one of the old ledger");
    assert_ne!(unreported[0].0, unreported[1].0);
}

#[tokio::test]
async fn a_file_of_a_later_version_is_left_alone_and_rejected_with_both_versions() {
    let dir = tempfile::tempdir().unwrap();
    let later = open(dir.path());
    count(&later, DAY, 1);
    write(&later, DAY).await;
    drop(later);
    let [file] = &days(dir.path())[..] else { panic!("one day") };
    let text = fs::read_to_string(file).unwrap().replace("\"version\":1", "\"version\":2");
    fs::write(file, &text).unwrap();
    let problem = files::parse(file, DAY).unwrap_err().to_string();
    assert!(problem.contains("version 2 is not supported; this process supports version 1"), "{problem}");
    let recorder = open(dir.path());
    count(&recorder, DAY, 4);
    write(&recorder, DAY).await;
    assert_eq!(fs::read_to_string(file).unwrap(), text);
    assert_eq!(days(dir.path()).len(), 2, "this process counts in a ledger of its own");
}

#[tokio::test]
async fn a_file_that_cannot_be_read_for_a_report_is_written_again() {
    let dir = tempfile::tempdir().unwrap();
    let recorder = open(dir.path());
    count(&recorder, DAY, 5);
    write(&recorder, DAY).await;
    let [(ledger, day)] = recorder.ledgers.lock().unreported()[..] else { panic!("one day") };
    let [file] = &days(dir.path())[..] else { panic!("one file") };
    fs::remove_file(file).unwrap();
    assert_eq!(recorder.ledgers.lock().read(ledger, day), None);
    write(&recorder, DAY).await;
    let read = recorder.ledgers.lock().read(ledger, day).expect("the file");
    assert_eq!((read.sequence, read.rows[0].counts.requests), (2, 5));
}

#[tokio::test]
async fn reported_ledgers_leave_no_files() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (open(dir.path()), open(dir.path()));
    count(&one, DAY, 1);
    count(&two, DAY, 1);
    write(&one, DAY).await;
    write(&two, DAY).await;
    drop((one, two));
    // The lock of a process that was killed before its first write.
    fs::write(dir.path().join("routes.usage-00000000000000ff.lock"), "").unwrap();
    let next = open(dir.path());
    assert_eq!(names(dir.path()).len(), 4, "two ledgers, each with its lock");
    let report = |ledgers: &mut Ledgers| {
        for (ledger, day) in ledgers.unreported() {
            let sequence = ledgers.read(ledger, day).unwrap().sequence;
            ledgers.reported(ledger, day, sequence);
        }
        ledgers.retire();
    };
    next.with_ledgers(move |_, ledgers| report(ledgers)).await;
    assert_eq!(names(dir.path()).len(), 2, "the former one is deleted");
    write(&next, UsageDay(DAY.0 + 2)).await;
    assert_eq!(names(dir.path()), [""; 0], "the day has ended");
    count(&next, UsageDay(DAY.0 + 2), 3);
    write(&next, UsageDay(DAY.0 + 2)).await;
    assert_eq!(requests(dir.path()), [3]);
    assert_eq!(names(dir.path()).len(), 2, "it is locked again");
}

#[tokio::test]
async fn a_day_that_a_hub_rejects_does_not_delay_the_others() {
    use axum::http::StatusCode;
    use identity::Transport;
    use resolver::{DnsSection, Resolver};

    let next_day = UsageDay(DAY.0 + 1);
    let (stored, mut received) = tokio::sync::watch::channel(Vec::new());
    let accept = move |axum::Json(usage): axum::Json<UsageV1>| async move {
        let is_rejected = usage.day == DAY.to_string();
        stored.send_modify(|days| days.push(usage.day));
        if is_rejected { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::NO_CONTENT }
    };
    let socket = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", socket.local_addr().unwrap());
    let router = axum::Router::new().route(paths::USAGE, axum::routing::post(accept));
    tokio::spawn(axum::serve(socket, router).into_future());
    let resolver = Resolver::new(&DnsSection::default());
    let client = ControlPlaneClient::new(&Hubs::one(url), &Transport::Loopback, resolver).unwrap();

    let dir = tempfile::tempdir().unwrap();
    let recorder = open(dir.path());
    count(&recorder, DAY, 1);
    count(&recorder, next_day, 2);
    write(&recorder, next_day).await;
    let error = recorder.report(&client).await.unwrap_err();
    assert_eq!(error.failure.status(), Some(StatusCode::SERVICE_UNAVAILABLE));
    assert_eq!(*received.borrow_and_update(), [DAY.to_string(), next_day.to_string()]);
    assert_eq!(recorder.counts.report_failures.get(), 1);
    // The rejected day is reported again, and only that one.
    recorder.report(&client).await.unwrap_err();
    assert_eq!(received.borrow_and_update().len(), 3);
    assert_eq!(received.borrow().last(), Some(&DAY.to_string()));
}
