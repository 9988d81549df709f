//! Permitted dependencies between the packages of this workspace.
//!
//! A dependency list is the one rule of architecture that the compiler enforces: code cannot call a package that is not in
//! it. So the table is about manifests; only the rule that another component's core may be used for its wire types only is
//! about source text.

use std::collections::{BTreeMap, BTreeSet};

use crate::manifests::{Package, made_up, packages};
use crate::none;
use crate::tree::{File, files};

/// Permitted dependencies of each package in this workspace. The root package may import all.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("configuration", &[]),
    ("regions", &["configuration"]),
    ("gateway-core", &["regions"]),
    ("scheduler-core", &["regions", "configuration"]),
    ("replica-core", &["regions", "configuration"]),
    ("supervision", &[]),
    ("scheduler-store", &["scheduler-core", "supervision"]),
    (
        "gateway",
        &[
            "gateway-core",
            "scheduler-core",
            "scheduler-store",
            "regions",
            "replica-core",
            "supervision",
            "configuration",
        ],
    ),
    ("scheduler", &["scheduler-core", "scheduler-store", "regions", "supervision", "configuration"]),
    ("trtllm", &[]),
    ("replica", &["replica-core", "regions", "trtllm", "supervision", "configuration"]),
    ("loadtest", &["replica-core", "regions", "configuration"]),
];
const ROOT: &str = "meridian";

/// Sources that may use only the wire types of this core package.
const ONLY_ITS_WIRE: &[(&str, &str)] = &[("gateway/src/", "replica_core"), ("loadtest/", "replica_core")];

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
            complaints.push(format!("{name} is not in the table of who may import whom"));
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

fn wire_complaints(files: &[File]) -> Vec<String> {
    let mut complaints = Vec::new();
    for (folder, core) in ONLY_ITS_WIRE {
        for File { path, text } in files.iter().filter(|file| file.path.starts_with(folder)) {
            let mut named = text.match_indices(core);
            if named.any(|(at, _)| !text[at + core.len()..].starts_with("::wire")) {
                complaints.push(format!("{path} names more of {core} than {core}::wire"));
            }
        }
    }
    complaints
}

#[test]
fn no_package_has_a_forbidden_dependency() {
    none(table_complaints(&packages()));
}

#[test]
fn only_wire_types_of_another_components_core_are_used() {
    none(wire_complaints(&files(|path| path.ends_with(".rs"))));
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
        ["common is not in the table of who may import whom"]
    );
}

#[test]
fn a_use_of_another_components_core_is_found() {
    let file = |path: &str, text: &str| File { path: path.to_owned(), text: text.to_owned() };
    let files = [
        file("gateway/src/a.rs", "use replica_core::wire::error::ErrorCode;"),
        file("gateway/src/b.rs", "use replica_core::{wire, batch};"),
        file("loadtest/src/c.rs", "use replica_core as core;"),
        file("replica/src/d.rs", "use replica_core::batch::Planner;"),
    ];
    let complaints = wire_complaints(&files);
    assert_eq!(complaints.len(), 2, "{complaints:?}");
    assert!(complaints[0].starts_with("gateway/src/b.rs") && complaints[1].starts_with("loadtest/src/c.rs"));
}
