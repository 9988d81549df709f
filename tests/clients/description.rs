//! `docs/api.md`, `docs/metrics.md` and `GET /openapi.json` against the code.

use gateway_core::endpoint::Endpoint;
use metrics::page::markdown;
use metrics::{MetricDescription, MetricHead, MetricKind};
use replica_api::api::OPERATIONS;
use serde_json::Value;

fn document() -> Value {
    serde_json::from_slice(gateway::openapi::document()).unwrap()
}

#[test]
fn the_description_lists_exactly_the_served_paths() {
    let document = document();
    let described = document["paths"].as_object().unwrap();
    for served in Endpoint::served() {
        let (method, path) = served.split_once(' ').unwrap();
        assert!(described[path][method.to_lowercase()]["summary"].is_string(), "{served} is not described");
    }
    for (path, methods) in described {
        let operations = methods.as_object().unwrap().keys().filter(|key| *key != "servers");
        // The root is served below the base URL of a deployment only.
        let path = if path == "/" { "/deployments/a".to_owned() } else { path.replace("{id}", "a") };
        for method in operations {
            assert!(Endpoint::of(&method.to_uppercase(), &path).is_ok(), "{method} {path} is not served");
        }
    }
    for operation in OPERATIONS {
        assert!(Endpoint::paths().any(|path| path == operation.path), "{} is not served", operation.path);
    }
}

#[test]
fn every_reference_resolves_and_operation_ids_are_unique() {
    let text = String::from_utf8(gateway::openapi::document().to_vec()).unwrap();
    assert!(text.len() < 160 << 10, "{} bytes without authentication", text.len());
    let document = document();
    let references: Vec<&str> =
        text.split("\"$ref\":\"#").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
    assert!(references.len() > 100, "{}", references.len());
    for reference in references {
        assert!(document.pointer(reference).is_some(), "{reference}");
    }
    let operations =
        document["paths"].as_object().unwrap().values().flat_map(|path| path.as_object().unwrap().values());
    let mut names: Vec<String> = operations.map(|operation| operation["operationId"].to_string()).collect();
    let all = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), all, "{names:?}");
}

#[test]
fn docs_api_md_is_the_page_that_the_code_renders() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/api.md");
    if std::env::var_os("MERIDIAN_WRITE_DOCS").is_some() {
        std::fs::write(path, gateway::openapi::markdown()).unwrap();
    }
    let page = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        page == gateway::openapi::markdown(),
        "docs/api.md is out of date: run this test with MERIDIAN_WRITE_DOCS=1"
    );
}

#[test]
fn docs_metrics_md_is_the_page_that_the_code_renders() {
    let roles = [
        gateway::edge::metrics(),
        gateway::ingress::metrics(),
        replica::metrics::metrics(),
        scheduler::hub::metrics(),
    ];
    for role in &roles {
        let mut names: Vec<String> = role.names().collect();
        let all = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all, "a metric of {} is declared twice", role.role);
        for MetricDescription { head: MetricHead { name, help, .. }, kind, .. } in &role.metrics {
            let is_counter = *kind == MetricKind::Counter;
            assert!(
                name.starts_with("te_") || is_counter == name.ends_with("_total"),
                "{name} is a {kind:?}"
            );
            assert!(help.ends_with('.'), "{name}: {help}");
        }
    }
    let (path, page) = (concat!(env!("CARGO_MANIFEST_DIR"), "/docs/metrics.md"), markdown(&roles));
    if std::env::var_os("MERIDIAN_WRITE_DOCS").is_some() {
        std::fs::write(path, &page).unwrap();
    }
    assert!(
        page == std::fs::read_to_string(path).unwrap_or_default(),
        "docs/metrics.md is out of date: run this test with MERIDIAN_WRITE_DOCS=1"
    );
}
