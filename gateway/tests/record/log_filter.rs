//! `/log` of the operations port: the filter of the log, and changes of it.

use super::fixture::{FILTER, Fixture};
use reqwest::Method;
use serde_json::{Value, json};

#[tokio::test]
async fn operators_change_the_filter_of_the_log_and_clients_do_not() {
    let fixture = Fixture::new().await;
    let url = format!("{}/log", fixture.operations);
    let send = async |method: Method, url: &str, body: &str| {
        let response = fixture.client.request(method, url).body(body.to_owned()).send().await.unwrap();
        let status = response.status().as_u16();
        (status, response.json::<Value>().await.unwrap_or_default())
    };
    let unchanged = json!({"filter": FILTER, "filter_at_start": FILTER, "restored_in_s": null});
    assert_eq!(send(Method::GET, &url, "").await, (200, unchanged.clone()));
    // Other tests of this process read the events of its own crates.
    let filter = FILTER.replace("mio=info", "mio=warn");
    let changed = json!({"filter": filter, "filter_at_start": FILTER, "restored_in_s": null});
    let change = json!({"filter": filter, "for_s": 0}).to_string();
    let restore = json!({"filter": FILTER}).to_string();
    assert_eq!(send(Method::PUT, &url, &change).await, (200, changed.clone()));
    for (body, part) in [
        (r#"{"filter": "inof"}"#.to_owned(), "did you mean info?"),
        (r#"{"filter": "info", "seconds": 1}"#.to_owned(), "`seconds`: unknown field"),
        (format!(r#"{{"filter": "info{}"}}"#, " ".repeat(4 << 10)), "at most 4096 bytes"),
    ] {
        let (status, problem) = send(Method::PUT, &url, &body).await;
        assert!(status == 400 && problem["error"].as_str().unwrap().contains(part), "{status}: {problem}");
    }
    assert_eq!(send(Method::DELETE, &url, "").await.0, 405);
    let (status, _) = send(Method::PUT, &format!("{}/log", fixture.url), &restore).await;
    assert!([401, 404].contains(&status), "the port of clients: {status}");
    assert_eq!(send(Method::GET, &url, "").await, (200, changed), "these had no effect");
    assert_eq!(send(Method::PUT, &url, &restore).await, (200, unchanged));
}
