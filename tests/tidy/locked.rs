//! The crates that `deny.toml` bans are not in the lock; checked here for machines without cargo-deny.

use std::collections::{BTreeMap, BTreeSet};

use toml::{Table, Value};

use crate::manifests::{graph, locked, parse, table};
use crate::none;
use crate::tree::read;

fn banned_crate_complaints(deny: &Table, graph: &BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
    let bans = table(deny, &["bans"]);
    let banned = bans.get("deny").and_then(Value::as_array).into_iter().flatten();
    let names: Vec<&str> = banned.filter_map(|entry| entry.get("crate")?.as_str()).collect();
    let mut complaints: Vec<String> = names
        .iter()
        .filter(|name| graph.contains_key(**name))
        .map(|name| format!("Cargo.lock holds {name}"))
        .collect();
    if names.is_empty() {
        complaints.push("deny.toml bans no crate".to_owned());
    }
    complaints
}

#[test]
fn no_banned_crate_is_locked() {
    none(banned_crate_complaints(&parse("deny.toml", &read("deny.toml")), &locked()));
}

#[test]
fn a_banned_crate_in_the_lock_is_found() {
    let deny = parse("deny", "[bans]\ndeny = [{ crate = \"openssl\" }]");
    let lock = |name: &str| graph(&parse("lock", &format!("[[package]]\nname = \"{name}\"")));
    assert_eq!(banned_crate_complaints(&deny, &lock("openssl")), ["Cargo.lock holds openssl"]);
    assert_eq!(banned_crate_complaints(&deny, &lock("rustls")), [""; 0]);
    assert_eq!(banned_crate_complaints(&Table::new(), &lock("rustls")).len(), 1);
}
