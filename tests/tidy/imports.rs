//! Permitted dependencies between the packages of this workspace.
//!
//! A dependency list is the one rule of architecture that the compiler enforces: code cannot call a package that is not in
//! it. So the table is about manifests.

use std::collections::{BTreeMap, BTreeSet};

use crate::manifests::{Package, made_up, packages};
use crate::none;

/// Permitted dependencies of each package in this workspace. The root package may import all.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("backoff", &[]),
    ("buckets", &[]),
    ("configuration", &[]),
    ("console", &["regions", "scheduler-api"]),
    ("embed", &[]),
    ("regions", &["configuration"]),
    ("http1", &[]),
    ("replica-api", &["configuration", "regions"]),
    ("scheduler-api", &["regions", "replica-api"]),
    ("jobs-core", &["backoff", "regions"]),
    ("jwt-core", &[]),
    ("jwt", &["jwt-core"]),
    ("telemetry-core", &["configuration"]),
    ("gateway-core", &["backoff", "jwt-core", "regions", "replica-api", "scheduler-api", "telemetry-core"]),
    ("scheduler-core", &["backoff", "configuration", "jwt-core", "regions", "replica-api", "scheduler-api"]),
    ("replica-core", &["regions", "replica-api"]),
    ("resolver-core", &["backoff", "configuration", "regions"]),
    ("metrics", &[]),
    ("supervision", &["backoff", "metrics"]),
    ("identity", &["configuration", "metrics", "regions", "supervision"]),
    ("telemetry", &["configuration", "identity", "metrics", "supervision", "telemetry-core"]),
    ("resolver", &["metrics", "regions", "resolver-core", "supervision"]),
    (
        "scheduler-client",
        &[
            "backoff",
            "identity",
            "regions",
            "replica-api",
            "resolver",
            "scheduler-api",
            "scheduler-core",
            "supervision",
        ],
    ),
    ("scheduler-store", &["backoff", "supervision"]),
    ("jobs", &["buckets", "jobs-core", "regions", "resolver", "supervision"]),
    (
        "gateway",
        &[
            "backoff",
            "configuration",
            "gateway-core",
            "http1",
            "identity",
            "jobs",
            "jobs-core",
            "jwt",
            "scheduler-api",
            "scheduler-client",
            "scheduler-core",
            "metrics",
            "regions",
            "replica-api",
            "resolver",
            "supervision",
            "telemetry",
        ],
    ),
    (
        "scheduler",
        &[
            "backoff",
            "configuration",
            "console",
            "identity",
            "jwt",
            "scheduler-api",
            "scheduler-client",
            "scheduler-core",
            "scheduler-store",
            "metrics",
            "regions",
            "replica-api",
            "resolver",
            "supervision",
            "telemetry",
        ],
    ),
    ("trtllm", &[]),
    (
        "replica",
        &[
            "backoff",
            "buckets",
            "configuration",
            "identity",
            "replica-api",
            "replica-core",
            "metrics",
            "regions",
            "trtllm",
            "supervision",
            "telemetry",
        ],
    ),
    ("loadtest", &["backoff", "configuration", "http1", "replica-api", "regions"]),
];
const ROOT: &str = "meridian";

fn table_complaints(packages: &[Package]) -> Vec<String> {
    let names: BTreeSet<&str> = packages.iter().map(|package| package.name.as_str()).collect();
    let may: BTreeMap<&str, &[&str]> = MAY_IMPORT.iter().copied().collect();
    let mut complaints = Vec::new();
    for Package { name, imports, lints_of_workspace, .. } in packages.iter() {
        if !lints_of_workspace {
            complaints.push(format!("{name} does not take the lints of the workspace"));
        }
        if name == ROOT {
            continue;
        }
        let Some(may) = may.get(name.as_str()) else {
            complaints.push(format!("{name} is not in the table of permitted imports"));
            continue;
        };
        for import in imports.iter().map(String::as_str).filter(|import| names.contains(import)) {
            if !may.contains(&import) {
                complaints.push(format!("{name} must not import {import}"));
            }
        }
    }
    complaints.extend(
        may.keys().filter(|name| !names.contains(*name)).map(|name| format!("there is no package {name}")),
    );
    complaints
}

#[test]
fn no_package_has_a_forbidden_dependency() {
    none(table_complaints(&packages()));
}

fn all_but(offender: Package) -> Vec<Package> {
    let others = MAY_IMPORT.iter().map(|(name, _)| made_up(name, ""));
    let mut packages: Vec<Package> = others.filter(|package| package.name != offender.name).collect();
    packages.push(offender);
    packages
}

#[test]
fn a_forbidden_dependency_is_found_under_any_name() {
    for dependencies in [
        "dependencies.scheduler.workspace = true",
        "dependencies.bridge.workspace = true",
        "dependencies.plan = { path = \"x\", package = \"scheduler\" }",
        "build-dependencies.scheduler.workspace = true",
        "target.'cfg(unix)'.dependencies.scheduler.workspace = true",
    ] {
        let packages = all_but(made_up("gateway", dependencies));
        assert_eq!(table_complaints(&packages), ["gateway must not import scheduler"], "{dependencies}");
    }
    assert_eq!(
        table_complaints(&all_but(made_up("gateway", "dependencies.regions.workspace = true"))),
        [""; 0]
    );
    assert_eq!(
        table_complaints(&all_but(made_up("common", ""))),
        ["common is not in the table of permitted imports"]
    );
}
