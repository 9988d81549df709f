//! Dependencies of core packages: no runtime, socket, file, clock or randomness.

use std::collections::{BTreeMap, BTreeSet};

use crate::manifests::{Package, graph, locked, made_up, packages, parse};
use crate::none;
use crate::tree::{File, files, is_source, read, root};

/// Core packages, which are pure.
const PURE: &[&str] = &[
    "backoff",
    "console",
    "regions",
    "http1",
    "jobs-core",
    "jwt-core",
    "gateway-core",
    "resolver-core",
    "scheduler-api",
    "scheduler-core",
    "replica-api",
    "replica-core",
    "telemetry-core",
];

/// Crates that provide a runtime, a socket, a file, a clock or randomness to their direct and indirect dependents.
const NOT_IN_A_CORE: &[&str] = &[
    "async-std",
    "axum",
    "fastrand",
    "getrandom",
    "hyper",
    "memmap2",
    "mio",
    "pingora",
    "pingora-core",
    "redb",
    "reqwest",
    "rustix",
    "rustls",
    "signal-hook",
    "smol",
    "socket2",
    "tempfile",
    "tokio",
    "tracing-subscriber",
    "ureq",
];

fn core_complaints(packages: &[Package], graph: &BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
    let mut complaints = Vec::new();
    for Package { name, imports, .. } in
        packages.iter().filter(|package| PURE.contains(&package.name.as_str()))
    {
        let mut reached = BTreeSet::new();
        let mut open: Vec<&String> = imports.iter().collect();
        while let Some(crate_name) = open.pop() {
            if reached.insert(crate_name.as_str()) {
                // The lock includes dev-dependencies of our packages; only the manifest separates them.
                let ours = packages
                    .iter()
                    .find(|package| package.name == *crate_name)
                    .map(|package| &package.imports);
                open.extend(ours.or_else(|| graph.get(crate_name)).into_iter().flatten());
            }
        }
        let banned = NOT_IN_A_CORE.iter().filter(|banned| reached.contains(**banned));
        complaints.extend(banned.map(|banned| format!("{name} only decides and must not reach {banned}")));
    }
    complaints
}

/// The clippy.toml files of all core packages must be equal.
fn ban_complaints(bans: &[(String, Option<String>)]) -> Vec<String> {
    let model = bans.iter().find_map(|(_, text)| text.clone()).unwrap_or_default();
    let mut complaints = Vec::new();
    for must in ["std::time::Instant::now", "std::time::SystemTime::now", "std::collections::HashMap"] {
        if !model.contains(must) {
            complaints.push(format!("no core bans {must}"));
        }
    }
    for (path, text) in bans {
        match text {
            None => complaints.push(format!("{path} is missing")),
            Some(text) if *text != model => {
                complaints.push(format!("{path} differs from that of the other cores"))
            }
            Some(_) => {}
        }
    }
    complaints
}

/// Names that do IO and can be reached from a core: those of the standard library, and the part of the configuration reader
/// that reads files.
const IO: &[&str] = &["std::fs", "std::net::Tcp", "std::net::Udp", "configuration::Files", "Files<"];

fn io_complaints(folders: &[String], files: &[File]) -> Vec<String> {
    let is_core = |path: &str| folders.iter().any(|folder| path.starts_with(&format!("{folder}/src/")));
    let of_file = |file: &File| {
        let named = IO.iter().filter(|name| file.code().contains(**name));
        named.map(|name| format!("{} names {name}; a core does no IO", file.path)).collect::<Vec<_>>()
    };
    files.iter().filter(|file| is_core(&file.path)).flat_map(of_file).collect()
}

#[test]
fn no_core_does_io() {
    let packages = packages();
    let cores = packages.iter().filter(|package| PURE.contains(&package.name.as_str()));
    let folders: Vec<String> = cores.map(|package| package.folder.clone()).collect();
    assert_eq!(folders.len(), PURE.len());
    none(io_complaints(&folders, &files(is_source)));
}

#[test]
fn io_in_a_core_is_found() {
    let file = |path: &str, text: &str| File { path: path.to_owned(), text: text.to_owned() };
    let files = [
        file("a/core/src/b.rs", "fn read(files: &Files<'_>) {}"),
        file("a/core/src/c.rs", "use std::fs;"),
        file("a/core/src/d.rs", "fn f() {}\n#[cfg(test)]\nmod tests {\n    use std::fs;\n}"),
        file("a/src/e.rs", "use std::fs;"),
    ];
    let found = io_complaints(&["a/core".to_owned()], &files);
    assert_eq!(found.len(), 2, "{found:?}");
}

#[test]
fn no_core_depends_on_a_runtime_a_socket_a_clock_or_randomness() {
    none(core_complaints(&packages(), &locked()));
}

#[test]
fn every_core_bans_clocks_and_unordered_maps() {
    let bans =
        packages().into_iter().filter(|package| PURE.contains(&package.name.as_str())).map(|package| {
            let path = format!("{}/clippy.toml", package.folder);
            (path.clone(), std::fs::read_to_string(root().join(path)).ok())
        });
    none(ban_complaints(&bans.collect::<Vec<_>>()));
}

#[test]
fn an_indirect_dependency_of_a_core_on_a_runtime_is_found() {
    let lock =
        "[[package]]\nname = \"helper\"\ndependencies = [\"tokio 1.0.0\"]\n[[package]]\nname = \"tokio\"";
    let graph = graph(&parse("lock", lock));
    let detour = "dependencies.helper = \"1\"";
    assert_eq!(
        core_complaints(&[made_up("gateway-core", detour)], &graph),
        ["gateway-core only decides and must not reach tokio"]
    );
    assert_eq!(core_complaints(&[made_up("gateway", detour)], &graph), [""; 0]);
}

#[test]
fn a_core_with_other_bans_is_found() {
    let good = read("regions/clippy.toml");
    let bans = |third: Option<&str>| {
        [("a", Some(good.as_str())), ("b", Some(good.as_str())), ("c", third)]
            .map(|(path, text)| (path.to_owned(), text.map(str::to_owned)))
    };
    assert_eq!(ban_complaints(&bans(Some(&good))), [""; 0]);
    assert_eq!(ban_complaints(&bans(None)), ["c is missing"]);
    assert_eq!(ban_complaints(&bans(Some("# none"))), ["c differs from that of the other cores"]);
    assert_eq!(ban_complaints(&[("a".to_owned(), Some(String::new()))]).len(), 3);
}
