//! `gateway.toml`, read once: what a person writes becomes what the edge can rely on, or a list of everything wrong.
//! Who may come in stands in a file of its own, which changes more often: `tenants`.

mod issuers;
mod tenants;

use crate::receipts::{RawReceipts, ReceiptsConfig};
use crate::tokens::Issuer;
use gateway_core::keys::KeyRing;
use regions::catalogue::Catalogue;
use regions::geography::GeoPoint;
use regions::id::RegionId;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The file, as written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawConfig {
    listen: String,
    operations: String,
    place: String,
    hub: String,
    snapshot: PathBuf,
    #[serde(default)]
    trusted_peers: Vec<String>,
    catalogue: Option<PathBuf>,
    tenants: PathBuf,
    receipts: Option<RawReceipts>,
}

/// What an edge gateway needs to know.
#[derive(Clone)]
pub struct EdgeConfig {
    /// Where clients connect.
    pub listen: SocketAddr,
    /// Where operators connect.
    pub operations: SocketAddr,
    /// The region beside which this gateway stands; its name in reports.
    pub place: RegionId,
    /// Where that is on the globe.
    pub point: GeoPoint,
    /// Base URL of the hub.
    pub hub: String,
    /// Where the last good route table is kept.
    pub snapshot: PathBuf,
    /// Who is believed about a client's place.
    pub trusted_peers: Vec<IpAddr>,
    /// Who may come in.
    pub keys: KeyRing,
    /// Whose tokens are taken.
    pub issuers: Vec<Issuer>,
    /// Clouds and regions.
    pub catalogue: Arc<Catalogue>,
    /// How receipts are kept, if they are.
    pub receipts: Option<ReceiptsConfig>,
}

impl EdgeConfig {
    /// Reads the configuration `text`; `environment` are the variables that secrets may come from, and relative paths
    /// are taken from `base`.
    ///
    /// # Errors
    ///
    /// Every problem at once, each naming the key, the value and what to write instead.
    pub fn parse(
        text: &str,
        base: &Path,
        environment: &BTreeMap<String, String>,
    ) -> Result<EdgeConfig, Vec<String>> {
        let raw: RawConfig = toml::from_str(text).map_err(|error| vec![error.to_string()])?;
        let RawConfig {
            listen,
            operations,
            place,
            hub,
            snapshot,
            trusted_peers,
            catalogue,
            tenants,
            receipts,
        } = raw;
        let mut problems = Vec::new();
        let catalogue = read_catalogue(catalogue.map(|path| base.join(path)), &mut problems);
        let listen = address("listen", &listen, &mut problems);
        let operations = address("operations", &operations, &mut problems);
        let place = find_place(&place, catalogue.as_ref(), &mut problems);
        if !hub.starts_with("http://") {
            problems.push(format!("hub = \"{hub}\" is no URL; write \"http://HOST:PORT\""));
        }
        let trusted_peers =
            trusted_peers.iter().filter_map(|peer| ip("trusted_peers", peer, &mut problems)).collect();
        let (keys, issuers) = read_tenants(&base.join(tenants), environment, &mut problems);
        let receipts = receipts.and_then(|raw| {
            let read = ReceiptsConfig::read(raw, base, environment);
            read.map_err(|found| problems.extend(found)).ok()
        });
        match (listen, operations, place, catalogue) {
            (Some(listen), Some(operations), Some((place, point)), Some(catalogue))
                if problems.is_empty() =>
            {
                let (snapshot, catalogue) = (base.join(snapshot), Arc::new(catalogue));
                Ok(EdgeConfig {
                    listen,
                    operations,
                    place,
                    point,
                    hub,
                    snapshot,
                    trusted_peers,
                    keys,
                    issuers,
                    catalogue,
                    receipts,
                })
            }
            _ => Err(problems),
        }
    }
}

fn read_catalogue(path: Option<PathBuf>, problems: &mut Vec<String>) -> Option<Catalogue> {
    let Some(path) = path else {
        return Some(Catalogue::builtin());
    };
    let text = std::fs::read_to_string(&path)
        .map_err(|error| problems.push(format!("catalogue = \"{}\" cannot be read: {error}", path.display())))
        .ok()?;
    Catalogue::parse(&text)
        .map_err(|found| {
            problems.extend(found.iter().map(|problem| format!("{}: {problem}", path.display())))
        })
        .ok()
}

fn address(key: &str, value: &str, problems: &mut Vec<String>) -> Option<SocketAddr> {
    value
        .parse()
        .map_err(|_| {
            problems
                .push(format!("{key} = \"{value}\" is no address; write \"IP:PORT\", as \"127.0.0.1:8080\""))
        })
        .ok()
}

fn ip(key: &str, value: &str, problems: &mut Vec<String>) -> Option<IpAddr> {
    value.parse().map_err(|_| problems.push(format!("{key} has \"{value}\", which is no IP address"))).ok()
}

fn find_place(
    value: &str,
    catalogue: Option<&Catalogue>,
    problems: &mut Vec<String>,
) -> Option<(RegionId, GeoPoint)> {
    let catalogue = catalogue?;
    let known =
        value.parse::<RegionId>().ok().and_then(|id| catalogue.get(&id).map(|region| (id, region.point)));
    if known.is_none() {
        problems.push(format!(
            "place = \"{value}\" is no region of the catalogue; write one as \"aws/us-east-1\""
        ));
    }
    known
}

fn read_tenants(
    path: &Path,
    environment: &BTreeMap<String, String>,
    problems: &mut Vec<String>,
) -> (KeyRing, Vec<Issuer>) {
    let mut found = Vec::new();
    let read = match std::fs::read_to_string(path) {
        Ok(text) => {
            let base = path.parent().unwrap_or(Path::new(""));
            tenants::read(&text, base, environment, &mut found)
        }
        Err(error) => {
            problems.push(format!("tenants = \"{}\" cannot be read: {error}", path.display()));
            (KeyRing::default(), Vec::new())
        }
    };
    problems.extend(found.into_iter().map(|problem| format!("{}: {problem}", path.display())));
    read
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<EdgeConfig, Vec<String>> {
        let environment = [("MERIDIAN_KEY", "s3cret"), ("MERIDIAN_RECEIPTS_KEY", "0123456789abcdef")];
        let environment = environment.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        EdgeConfig::parse(text, Path::new("../configs"), &environment)
    }

    #[test]
    fn the_example_that_people_edit_is_a_valid_configuration() {
        let config = parse(include_str!("../../../configs/gateway.toml"));
        let config = config.map_err(|problems| problems.join("\n"));
        assert_eq!(config.map(|config| config.place.to_string()), Ok("aws/us-east-1".to_owned()));
    }

    #[test]
    fn a_key_that_nobody_knows_is_refused_by_name() {
        let text = include_str!("../../../configs/gateway.toml").replace("snapshot =", "snapshott =");
        let problems = parse(&text).err().expect("a wrong key").join("\n");
        assert!(problems.contains("snapshott"), "{problems}");
    }

    #[test]
    fn all_problems_are_told_at_once() {
        let problems = parse(
            r#"
            listen = "8080"
            operations = "localhost"
            place = "aws/atlantis-1"
            hub = "hub.internal"
            snapshot = "routes"
            trusted_peers = ["nobody"]
            tenants = "nobody.toml"
            receipts = { dir = "receipts" }
            "#,
        )
        .err()
        .expect("many problems");
        for wanted in ["listen", "operations", "place", "hub", "trusted_peers", "nobody.toml", "receipts"] {
            assert!(problems.iter().any(|problem| problem.contains(wanted)), "{wanted} in {problems:#?}");
        }
        assert_eq!(problems.len(), 7, "{problems:#?}");
    }

    #[test]
    fn the_key_of_receipts_is_there_once_and_cannot_be_guessed() {
        let example = include_str!("../../../configs/gateway.toml");
        let config = parse(example).map_err(|problems| problems.join("\n")).unwrap();
        let receipts = config.receipts.expect("the example keeps receipts");
        assert!(!receipts.required && receipts.dir.ends_with("receipts"), "{:?}", receipts.dir);
        let check = |from: &str, to: &str, word: &str| {
            assert!(example.contains(from), "{from}");
            let problems = parse(&example.replace(from, to)).err().expect(to);
            assert!(problems.len() == 1 && problems[0].contains(word), "{word} in {problems:#?}");
        };
        check("MERIDIAN_RECEIPTS_KEY", "NOT_SET", "NOT_SET");
        check("MERIDIAN_RECEIPTS_KEY", "MERIDIAN_KEY", "fewer than 16 bytes");
        check("key_env = \"MERIDIAN_RECEIPTS_KEY\"", "key_file = \"nowhere\"", "nowhere");
        check("key_env = \"MERIDIAN_RECEIPTS_KEY\"", "", "one of key_file and key_env");
    }
}
