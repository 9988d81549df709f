//! Classification requests, and the validation of their responses.

use std::future::pending;

use crate::server::{respond, serve, to};
use loadtest::{Options, RawOptions, Report, run};
use serde_json::json;

async fn load(labels: &'static [f32]) -> Report {
    let address = serve(move |arrived| {
        assert_eq!(arrived.path, "/classify");
        let texts = arrived.body["input"].as_array().map_or(0, Vec::len);
        // From the second request on the number of labels is that of the test.
        let probs = if arrived.number == 0 { &[0.25_f32, 0.75] } else { labels };
        let text =
            |index| json!({"index": index, "label": "yes", "probs": probs, "num_classes": probs.len()});
        let data: Vec<_> = (0..texts).map(text).collect();
        std::future::ready(respond(200, "aws/us-east-1", json!({"object": "list", "data": data}).to_string()))
    })
    .await;
    let raw = RawOptions {
        workload: "classify".to_owned(),
        inputs: Some(3),
        rate: "100".to_owned(),
        duration: Some("100ms".to_owned()),
        ..to(address)
    };
    let options = Options::check(raw).expect("the options are valid");
    run(options, |_| {}, pending()).await.expect("the server listens")
}

#[tokio::test(flavor = "multi_thread")]
async fn texts_are_classified() {
    let report = load(&[1.0, 0.0]).await;
    assert_eq!((report.record.total().ok(), report.failed()), (10, 0), "{}", report.table());
}

#[tokio::test(flavor = "multi_thread")]
async fn responses_with_different_numbers_of_labels_are_failures() {
    let report = load(&[1.0, 0.0, 0.0]).await;
    assert_eq!((report.record.total().ok(), report.failed()), (1, 9), "{}", report.table());
    assert!(report.table().contains("rows of different lengths"), "{}", report.table());
}
