//! Packages of the workspace and their dependencies, from the manifests and the lock.

use std::collections::{BTreeMap, BTreeSet};

use toml::{Table, Value};

use crate::tree::read;

/// Manifest of a package.
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) folder: String,
    pub(crate) imports: BTreeSet<String>,
    pub(crate) lints_of_workspace: bool,
}

pub(crate) fn packages() -> Vec<Package> {
    let workspace = parse("Cargo.toml", &read("Cargo.toml"));
    let shared = table(&workspace, &["workspace", "dependencies"]);
    let members = workspace["workspace"]["members"].as_array().expect("members is a list");
    members
        .iter()
        .filter_map(Value::as_str)
        .map(|folder| {
            let path = format!("{folder}/Cargo.toml");
            package(folder, &parse(&path, &read(&path)), &shared)
        })
        .collect()
}

pub(crate) fn parse(path: &str, text: &str) -> Table {
    text.parse().unwrap_or_else(|error| panic!("{path}: {error}"))
}

pub(crate) fn table(within: &Table, path: &[&str]) -> Table {
    let step =
        |within: Table, key: &&str| within.get(*key).and_then(Value::as_table).cloned().unwrap_or_default();
    path.iter().fold(within.clone(), step)
}

pub(crate) fn package(folder: &str, manifest: &Table, shared: &Table) -> Package {
    let targets = table(manifest, &["target"]);
    let holders = targets.values().filter_map(Value::as_table).chain([manifest]);
    let dependencies = holders.flat_map(|holder| {
        ["dependencies", "build-dependencies"].into_iter().flat_map(|kind| table(holder, &[kind]))
    });
    // A dependency may be renamed here or in the workspace; the package name is what matters.
    let real_name = |(key, value): (String, Value)| {
        let renamed =
            [Some(&value), shared.get(&key)].into_iter().flatten().find_map(|value| value.get("package"));
        renamed.and_then(Value::as_str).map_or(key.clone(), str::to_owned)
    };
    Package {
        name: manifest["package"]["name"].as_str().expect("a package has a name").to_owned(),
        folder: folder.to_owned(),
        imports: dependencies.map(real_name).collect(),
        lints_of_workspace: table(manifest, &["lints"]).get("workspace") == Some(&Value::Boolean(true)),
    }
}

/// Returns the dependencies of each crate in the lock, with all versions of a crate merged.
pub(crate) fn graph(lock: &Table) -> BTreeMap<String, BTreeSet<String>> {
    let mut graph: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for package in lock["package"].as_array().into_iter().flatten() {
        let name = package["name"].as_str().expect("a locked package has a name").to_owned();
        let dependencies = package.get("dependencies").and_then(Value::as_array).into_iter().flatten();
        let names = dependencies.filter_map(|entry| entry.as_str()?.split(' ').next().map(str::to_owned));
        graph.entry(name).or_default().extend(names);
    }
    graph
}

/// Returns the dependency graph of this workspace.
pub(crate) fn locked() -> BTreeMap<String, BTreeSet<String>> {
    graph(&parse("Cargo.lock", &read("Cargo.lock")))
}

/// Returns a package for a test, with these dependencies.
pub(crate) fn made_up(name: &str, dependencies: &str) -> Package {
    let shared = parse("shared", "bridge = { path = \"x\", package = \"scheduler\" }");
    let manifest = format!("package.name = \"{name}\"\nlints.workspace = true\n{dependencies}");
    package("somewhere", &parse(name, &manifest), &shared)
}
