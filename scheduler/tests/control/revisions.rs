//! Tests of model revisions at the hub: pinned by the first report, held, promoted, listed.

use super::world::{AMERICA, Hub, config};
use regions::{ModelRevision, RouteTable};
use scheduler_api::paths;
use serde_json::{Value, json};

const F32: &str = "00000000000000aa";
const INT8: &str = "00000000000000bb";

fn file(precision: &str) -> String {
    format!(
        "[[deployment]]\nname = \"d\"\ntask = \"embed\"\nmodel = \"pypi://m\"\nengine = {{ kind = \"cpu\", precision = \"{precision}\" }}\n"
    )
}

/// Applies the deployment; returns the notes of the hub.
async fn apply(hub: &Hub, precision: &str, hold: bool) -> Value {
    let message = json!({"version": 1, "dry_run": false, "base": null, "hold": hold,
                         "deployments": [{"name": "d.toml", "text": file(precision)}]});
    let request = hub.client.post(format!("{}{}", hub.url, paths::APPLY)).body(message.to_string());
    let response = request.send().await.unwrap();
    assert_eq!(response.status().as_u16(), 200);
    response.json::<Value>().await.unwrap()["notes"].clone()
}

/// Registers the region with this number of ready replicas of each revision.
async fn report(hub: &Hub, boot_id: u64, models: &[(&str, &str, u32)]) {
    let model = |(revision, precision, ready): &(&str, &str, u32)| {
        json!({"revision": revision, "source": "pypi://m", "task": "embed",
               "engine": {"kind": "cpu", "precision": precision}, "replicas": ready, "ready": ready})
    };
    let models: Vec<_> = models.iter().map(model).collect();
    let body = json!({"version": 1, "region": AMERICA, "instance": boot_id.to_string(), "endpoint": "10.0.0.1:7100", "boot_id": boot_id,
                      "deployments": ["d"], "models": [{"name": "d", "models": models}]});
    let (status, _, body) = hub.post(paths::SPOKES, body.to_string()).await;
    assert_eq!(status, 200, "{body}");
}

async fn promote(hub: &Hub, name: &str) -> (u16, Value) {
    let url = format!("{}/v1/deployments/{name}/promote", hub.url);
    let response = hub.client.post(url).send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

/// Returns the served precision and revision, and the next revision.
fn served(table: &RouteTable) -> (String, Option<String>, Option<String>) {
    let name = "d".parse().unwrap();
    let text = |revision: ModelRevision| revision.to_string();
    let served = table.revision(&name);
    let next = served.and_then(|served| served.next.as_ref()).and_then(|next| next.revision);
    let precision = table.deployments.get(&name).map(|it| it.engine.precision.to_string());
    (precision.unwrap_or_default(), served.map(|served| text(served.current)), next.map(text))
}

#[tokio::test]
async fn a_held_model_change_is_listed_and_waits_for_its_promotion() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub::start(config(dir.path())).await;
    apply(&hub, "f32", false).await;
    report(&hub, 1, &[(F32, "f32", 2)]).await;
    let text = |text: &str| Some(text.to_owned());
    let is = async |description: &str, expected: (&str, &str, Option<&str>)| {
        let (precision, current, next) = expected;
        let expected = (precision.to_owned(), text(current), next.map(str::to_owned));
        hub.wait_for_routes(description, |table| served(table) == expected).await
    };
    is("the first revision is pinned", ("f32", F32, None)).await;
    let (status, body) = promote(&hub, "d").await;
    assert_eq!(status, 409, "there is nothing to promote: {body}");

    let notes = apply(&hub, "int8", true).await.to_string();
    assert!(notes.contains("meridian apply --promote d"), "{notes}");
    report(&hub, 1, &[(F32, "f32", 2), (INT8, "int8", 2)]).await;
    is("it is held", ("f32", F32, Some(INT8))).await;
    let (_, _, rollout) = hub.get(paths::ROLLOUT).await;
    let shown = &rollout["deployments"][0];
    assert_eq!((&shown["revision"], &shown["next"]["revision"]), (&json!(F32), &json!(INT8)), "{rollout}");
    assert_eq!(
        (&shown["next"]["held"], &shown["regions"][0]["models"][1]["ready"]),
        (&json!(true), &json!(2))
    );

    assert_eq!(promote(&hub, "unknown").await.0, 404);
    let (status, body) = promote(&hub, "d").await;
    assert_eq!((status, &body["revision"]), (200, &json!(INT8)));
    is("it is promoted", ("int8", INT8, None)).await;

    // Without --hold no promotion is needed; and an earlier promotion does not apply to the next change.
    apply(&hub, "f32", false).await;
    is("the change is reverted", ("f32", F32, None)).await;
    apply(&hub, "int8", true).await;
    is("it is held again", ("f32", F32, Some(INT8))).await;
}
