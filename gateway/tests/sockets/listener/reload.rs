//! Key files that change while a gateway runs, and a second process without `--take-over`.

use super::fixture::{BODY, Edge, Fixture, TIMEOUT, post};
use std::time::{Duration, Instant};

async fn status(edge: &Edge, key: &str) -> u16 {
    let request = post("connection: close\r\n", BODY).replace("Bearer k\r\n", &format!("Bearer {key}\r\n"));
    edge.send_bytes(request.as_bytes()).await.status
}

async fn wait_for_status(edge: &Edge, key: &str, expected: u16) {
    let begun = Instant::now();
    while status(edge, key).await != expected {
        assert!(begun.elapsed() < TIMEOUT, "the status for the key {key} is not {expected}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn failures(edge: &Edge) -> u64 {
    let (_, text) = edge.operate("/metrics").await;
    let name = "meridian_gateway_tenants_reload_failures_total ";
    text.lines().find_map(|line| line.strip_prefix(name)).expect("the metric").parse().unwrap()
}

#[tokio::test]
async fn a_revoked_key_is_rejected_within_seconds_and_an_invalid_file_changes_nothing() {
    let fixture = Fixture::new().await;
    let edge = fixture.edge("").await;
    let file = |name: &str, text: &str| std::fs::write(fixture.dir.path().join(name), text).unwrap();
    assert_eq!((status(&edge, "k").await, status(&edge, "new").await), (200, 401));
    file("key", "k\nnew\n");
    wait_for_status(&edge, "new", 200).await;
    assert_eq!(status(&edge, "k").await, 200, "it has both for a while");
    file("key", "new\n");
    wait_for_status(&edge, "k", 401).await;
    assert_eq!((status(&edge, "new").await, failures(&edge).await), (200, 0));

    // Empty, then missing: the previous keys stay, and each failure is counted once.
    file("key", " \n");
    let begun = Instant::now();
    while failures(&edge).await < 1 {
        assert!(begun.elapsed() < TIMEOUT, "a broken file is not counted");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(status(&edge, "new").await, 200);
    // A tenant with an invalid residency is rejected as at start, and the others stay unchanged.
    file("key", "newer\n");
    let tenants = "[[tenant]]\nname = 'test'\nkey_file = 'key'\n";
    file("tenants.toml", &format!("{tenants}residency = {{ allow = ['euu'] }}\n"));
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert_eq!((status(&edge, "new").await, status(&edge, "newer").await), (200, 401));
    file("tenants.toml", tenants);
    wait_for_status(&edge, "newer", 200).await;
    assert_eq!(status(&edge, "new").await, 401);
}

#[tokio::test]
async fn a_second_process_without_take_over_exits_and_the_first_continues() {
    let fixture = Fixture::new().await;
    let config = "handover = 'handover'\n[timeouts]\nlame_duck = '0s'\n";
    let mut running = fixture.edge(config).await;
    let again = fixture.config(config).map_err(|problems| problems.join("\n")).unwrap();
    let error = gateway::edge::run(again, std::future::pending(), |_| panic!("it does not start")).await;
    let error = error.expect_err("another one runs").to_string();
    for part in ["--take-over", "127.0.0.1", "handover", &format!("process {}", std::process::id())] {
        assert!(error.contains(part), "{part} in {error}");
    }
    assert_eq!(status(&running, "k").await, 200, "it serves as before");
    // A process with another handover path does not get the port either.
    let mut elsewhere = fixture.config("").map_err(|problems| problems.join("\n")).unwrap();
    elsewhere.listen = running.address;
    let error = gateway::edge::run(elsewhere, std::future::pending(), |_| panic!("it does not start")).await;
    let error = error.expect_err("the port is taken").to_string();
    for part in [&running.address.to_string()[..], &format!("stop process {}", std::process::id())] {
        assert!(error.contains(part), "{part} in {error}");
    }
    let mut nowhere = fixture.config("").map_err(|problems| problems.join("\n")).unwrap();
    nowhere.take_over = true;
    let error = gateway::edge::run(nowhere, std::future::pending(), |_| panic!("it does not start")).await;
    assert!(error.expect_err("a takeover without a handover path").to_string().contains("`handover`"));
    let next = fixture.edge_after(config, Some(&running)).await;
    tokio::time::timeout(TIMEOUT, &mut running.running).await.expect("it ends").unwrap();
    assert_eq!(status(&next, "k").await, 200, "the process with take-over serves");
}

#[tokio::test]
async fn gateways_with_the_same_directory_of_explanations_run_together_only_during_a_handover() {
    let fixture = Fixture::new().await;
    let explanations = "[explanations]\ndir = 'explanations'\n";
    let config = format!("handover = 'handover'\n[timeouts]\nlame_duck = '0s'\n{explanations}");
    let mut running = fixture.edge(&config).await;
    let other = fixture.config(explanations).map_err(|problems| problems.join("\n")).unwrap();
    let error = gateway::edge::run(other, std::future::pending(), |_| panic!("it does not start")).await;
    let error = error.expect_err("another one has the directory").to_string();
    let dir = fixture.dir.path().join("explanations").display().to_string();
    for part in [&dir[..], "set `dir` of [explanations] of one of them to another directory"] {
        assert!(error.contains(part), "{part} in {error}");
    }
    let next = fixture.edge_after(&config, Some(&running)).await;
    tokio::time::timeout(TIMEOUT, &mut running.running).await.expect("it ends").unwrap();
    assert_eq!(status(&next, "k").await, 200, "the process with take-over serves");
}
