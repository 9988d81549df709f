//! Configuration of a gateway: `gateway.toml`, validated once into [`EdgeConfig`] or a list of all problems. Tenants
//! have a file of their own, `tenants`, which changes more often.

mod bodies;
mod cors;
mod fleet;
mod issuers;
mod tenants;
mod timeouts;

pub use crate::request_body::BodyLimits;
pub(crate) use tenants::TenantsRead;
pub use tenants::{TenantsFile, check_tenants};
pub use timeouts::Timeouts;

use crate::hop::{RawRegionTls, RegionTransport};
pub use crate::listener::AddressLimits;
use crate::listener::{CONNECTIONS_MAX, CONNECTIONS_PER_ADDRESS_MAX, HALF_OPEN_PER_ADDRESS_MAX};
use crate::receipts::{RawReceipts, ReceiptsConfig};
use crate::tls::TlsIdentity;
use crate::tokens::Issuer;
use gateway_core::cors::Cors;
use gateway_core::keys::KeyRing;
use regions::catalogue::Catalogue;
use regions::geography::GeoPoint;
use regions::id::RegionId;
use scheduler_core::hubs::{Hubs, RawHubs};
use scheduler_core::policy_age;
use scheduler_core::token::Token;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Raw file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawConfig {
    listen: String,
    operations: String,
    region: String,
    hub: RawHubs,
    fleet_token_file: Option<PathBuf>,
    fleet_token_env: Option<String>,
    snapshot: PathBuf,
    policy_max_age: Option<String>,
    #[serde(default)]
    trusted_peers: Vec<String>,
    catalogue: Option<PathBuf>,
    tenants: Option<PathBuf>,
    receipts: Option<RawReceipts>,
    tls: Option<RawTls>,
    region_tls: Option<RawRegionTls>,
    region_http: Option<i64>,
    handover: Option<PathBuf>,
    gzip_min_bytes: Option<i64>,
    connections_max: Option<i64>,
    connections_per_address_max: Option<i64>,
    half_open_per_address_max: Option<i64>,
    cors: Option<cors::RawCors>,
    #[serde(default = "yes")]
    hedge: bool,
    #[serde(default = "yes")]
    spill: bool,
    #[serde(default)]
    timeouts: timeouts::RawTimeouts,
    #[serde(default)]
    bodies: bodies::RawBodies,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTls {
    certificate: PathBuf,
    key: PathBuf,
}

fn yes() -> bool {
    true
}

/// Minimum of `gzip_min_bytes`: a smaller response fits into one packet uncompressed.
const GZIP_MIN_BYTES_MIN: usize = 1024;

/// Configuration of a gateway.
#[derive(Clone)]
pub struct EdgeConfig {
    /// Address for clients.
    pub listen: SocketAddr,
    /// Address for operators.
    pub operations: SocketAddr,
    /// Region of this gateway; its name in reports.
    pub region: RegionId,
    /// Coordinates of that region.
    pub point: GeoPoint,
    /// Hubs.
    pub hub: Hubs,
    /// Token that authenticates the gateway to the hubs.
    pub fleet: Option<Token>,
    /// Path of the last valid route table.
    pub snapshot: PathBuf,
    /// Requests of locked deployments are rejected when the last confirmation of the route table by a hub is older.
    pub policy_max_age: Duration,
    /// Peers whose x-meridian-client-geo header is trusted.
    pub trusted_peers: Vec<IpAddr>,
    /// Certificate for clients; without it, clients connect over plaintext HTTP.
    pub tls: Option<Arc<TlsIdentity>>,
    /// TLS to regions.
    pub regions: RegionTransport,
    /// Whether HTTP/2 is used to regions that support it.
    pub region_http2: bool,
    /// Socket through which the next process takes over the listening sockets.
    pub handover: Option<PathBuf>,
    /// Whether this process takes the sockets of the running one over. Set by the command line, not by the file.
    pub take_over: bool,
    /// Minimum size of JSON responses that are compressed for clients that accept it; without it, none is.
    pub gzip_min_bytes: Option<usize>,
    /// Maximum number of open client connections.
    pub connections_max: usize,
    /// Limits per client address.
    pub addresses: AddressLimits,
    /// Origins whose pages may read responses; without it, none.
    pub cors: Option<Cors>,
    /// Whether interactive requests that are slower than almost all others are hedged in another region.
    pub hedge: bool,
    /// Whether overflow of the nearest region is sent to another region that has offered credit.
    pub spill: bool,
    /// Timeouts of client connections.
    pub timeouts: Timeouts,
    /// Memory limits and timeouts of request bodies.
    pub bodies: BodyLimits,
    /// Tenants file, for reloads.
    pub tenants: Option<TenantsFile>,
    /// Keys of the tenants.
    pub keys: KeyRing,
    /// Issuers of accepted tokens.
    pub issuers: Vec<Issuer>,
    /// Catalogue of clouds and regions.
    pub catalogue: Arc<Catalogue>,
    /// Receipts, if they are configured.
    pub receipts: Option<ReceiptsConfig>,
}

impl EdgeConfig {
    /// Validates the configuration `text`. Secrets may come from `environment`; relative paths are relative to `base`.
    ///
    /// # Errors
    ///
    /// Returns all problems, each with the key, the value and the fix.
    pub fn parse(
        text: &str,
        base: &Path,
        environment: &BTreeMap<String, String>,
    ) -> Result<EdgeConfig, Vec<String>> {
        let raw: RawConfig = toml::from_str(text).map_err(|error| vec![error.to_string()])?;
        let RawConfig {
            listen,
            operations,
            region,
            hub,
            fleet_token_file,
            fleet_token_env,
            snapshot,
            policy_max_age,
            trusted_peers,
            catalogue,
            tenants,
            receipts,
            tls,
            region_tls,
            region_http,
            handover,
            gzip_min_bytes,
            connections_max,
            connections_per_address_max,
            half_open_per_address_max,
            cors,
            hedge,
            spill,
            timeouts,
            bodies,
        } = raw;
        let mut problems = Vec::new();
        let catalogue = read_catalogue(catalogue.map(|path| base.join(path)), &mut problems).map(Arc::new);
        let listen = address("listen", &listen, &mut problems);
        let operations = address("operations", &operations, &mut problems);
        let region = find_region(&region, catalogue.as_deref(), &mut problems);
        let hub = Hubs::read(hub).map_err(|found| problems.extend(found)).ok();
        let fleet = fleet::read(fleet_token_file, fleet_token_env, base, environment);
        let fleet = fleet.map_err(|problem| problems.push(problem)).ok().flatten();
        let trusted_peers: Vec<_> =
            trusted_peers.iter().filter_map(|peer| ip("trusted_peers", peer, &mut problems)).collect();
        // Without a tenants file the tenants are those that an operator applies.
        let tenants = tenants.map(|path| base.join(path)).zip(catalogue.as_ref());
        let tenants = tenants.map(|(path, catalogue)| TenantsFile::new(path, environment, catalogue));
        let (keys, issuers) =
            tenants.as_ref().map(|file| read_tenants(file, &mut problems)).unwrap_or_default();
        let receipts = receipts.and_then(|raw| {
            let read = ReceiptsConfig::read(raw, base, environment);
            read.map_err(|found| problems.extend(found)).ok()
        });
        let tls = tls.and_then(|RawTls { certificate, key }| {
            let loaded = TlsIdentity::load(base.join(certificate), base.join(key));
            loaded.map_err(|found| problems.extend(found)).ok().map(Arc::new)
        });
        let regions = region.as_ref().zip(catalogue.as_ref()).and_then(|((region, _), catalogue)| {
            let read = RegionTransport::read(region_tls, base, region, catalogue);
            read.map_err(|found| problems.extend(found)).ok()
        });
        let region_http2 = http_version(region_http, &mut problems);
        let gzip_min_bytes = at_least(
            "gzip_min_bytes",
            GZIP_MIN_BYTES_MIN,
            "remove it to disable compression",
            gzip_min_bytes,
            &mut problems,
        );
        let connections_max =
            at_least("connections_max", 1, "remove it for the default 10000", connections_max, &mut problems);
        let connections_per_address_max = at_least(
            "connections_per_address_max",
            1,
            "remove it for the default 5000",
            connections_per_address_max,
            &mut problems,
        );
        let half_open_per_address_max = at_least(
            "half_open_per_address_max",
            1,
            "remove it for the default 1000",
            half_open_per_address_max,
            &mut problems,
        );
        let cors = cors.and_then(|raw| raw.read().map_err(|found| problems.extend(found)).ok());
        let timeouts = timeouts.read(&mut problems);
        let bodies = bodies.read(timeouts.body, &mut problems);
        let policy_max_age = policy_age::read_max_age(policy_max_age.as_deref());
        let policy_max_age = policy_max_age.unwrap_or_else(|problem| {
            problems.push(problem);
            policy_age::POLICY_MAX_AGE
        });
        match (listen, operations, region, hub, catalogue, regions) {
            (
                Some(listen),
                Some(operations),
                Some((region, point)),
                Some(hub),
                Some(catalogue),
                Some(regions),
            ) if problems.is_empty() => {
                let snapshot = base.join(snapshot);
                let handover = handover.map(|path| base.join(path));
                Ok(EdgeConfig {
                    listen,
                    operations,
                    region,
                    point,
                    hub,
                    fleet,
                    snapshot,
                    policy_max_age,
                    trusted_peers: trusted_peers.clone(),
                    tls,
                    regions,
                    region_http2,
                    handover,
                    take_over: false,
                    gzip_min_bytes,
                    connections_max: connections_max.unwrap_or(CONNECTIONS_MAX),
                    addresses: AddressLimits {
                        connections: connections_per_address_max.unwrap_or(CONNECTIONS_PER_ADDRESS_MAX),
                        half_open: half_open_per_address_max.unwrap_or(HALF_OPEN_PER_ADDRESS_MAX),
                        exempt: trusted_peers.iter().map(IpAddr::to_canonical).collect(),
                    },
                    cors,
                    hedge,
                    spill,
                    timeouts,
                    bodies,
                    tenants,
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

/// Validates an optional number with a minimum.
fn at_least(
    key: &str,
    min: usize,
    alternative: &str,
    given: Option<i64>,
    problems: &mut Vec<String>,
) -> Option<usize> {
    let given = given?;
    let checked = usize::try_from(given).ok().filter(|given| *given >= min);
    if checked.is_none() {
        problems.push(format!("{key} = {given} is less than {min}; raise it, or {alternative}"));
    }
    checked
}

/// Returns whether HTTP/2 is configured.
fn http_version(given: Option<i64>, problems: &mut Vec<String>) -> bool {
    match given {
        None | Some(1) => false,
        Some(2) => true,
        Some(other) => {
            problems.push(format!("region_http = {other} is not supported; use 1 or 2"));
            false
        }
    }
}

fn address(key: &str, value: &str, problems: &mut Vec<String>) -> Option<SocketAddr> {
    value
        .parse()
        .map_err(|_| {
            problems.push(format!(
                "{key} = \"{value}\" is not an address; write IP:PORT, such as \"127.0.0.1:8080\""
            ))
        })
        .ok()
}

fn ip(key: &str, value: &str, problems: &mut Vec<String>) -> Option<IpAddr> {
    value
        .parse()
        .map_err(|_| problems.push(format!("{key} contains \"{value}\", which is not an IP address")))
        .ok()
}

fn find_region(
    value: &str,
    catalogue: Option<&Catalogue>,
    problems: &mut Vec<String>,
) -> Option<(RegionId, GeoPoint)> {
    let catalogue = catalogue?;
    let known =
        value.parse::<RegionId>().ok().and_then(|id| catalogue.get(&id).map(|region| (id, region.point)));
    if known.is_none() {
        problems.push(format!(
            "region = \"{value}\" is not in the catalogue; write one such as \"aws/us-east-1\""
        ));
    }
    known
}

fn read_tenants(file: &TenantsFile, problems: &mut Vec<String>) -> (KeyRing, Vec<Issuer>) {
    match file.read() {
        Ok(TenantsRead { keys, issuers, digest: _ }) => (keys, issuers),
        Err(found) => {
            let path = file.path().display();
            problems.extend(found.into_iter().map(|problem| format!("{path}: {problem}")));
            Default::default()
        }
    }
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
    fn the_example_configuration_is_valid() {
        let config = parse(include_str!("../../../configs/gateway.toml"));
        let config = config.map_err(|problems| problems.join("\n"));
        assert_eq!(config.map(|config| config.region.to_string()), Ok("aws/us-east-1".to_owned()));
    }

    #[test]
    fn an_unknown_key_is_rejected_by_name() {
        let text = include_str!("../../../configs/gateway.toml").replace("snapshot =", "snapshott =");
        let problems = parse(&text).err().expect("a wrong key").join("\n");
        assert!(problems.contains("snapshott"), "{problems}");
    }

    #[test]
    fn compression_has_a_minimum_size() {
        let with = |line: &str| {
            let text = include_str!("../../../configs/gateway.toml");
            parse(&text.replace("# gzip_min_bytes = 65536", line)).map(|config| config.gzip_min_bytes)
        };
        assert_eq!(with(""), Ok(None));
        assert_eq!(with("gzip_min_bytes = 1024"), Ok(Some(1024)));
        for wrong in ["gzip_min_bytes = 1023", "gzip_min_bytes = -1"] {
            assert!(with(wrong).is_err_and(|problems| problems[0].contains("1024")), "{wrong}");
        }
    }

    #[test]
    fn an_address_is_limited_to_a_share_of_the_connections_unless_it_is_trusted() {
        let with = |key: &str, value: &str| {
            let text = include_str!("../../../configs/gateway.toml");
            let default = if key == "half_open_per_address_max" { 1000 } else { 5000 };
            let written = format!("# {key} = {default}");
            assert!(text.contains(&written), "{written}");
            parse(&text.replace(&written, &format!("{key} = {value}"))).map(|config| config.addresses)
        };
        let limits = with("connections_per_address_max", "7").unwrap();
        let trusted = vec![IpAddr::from([127, 0, 0, 1])];
        assert_eq!(limits, AddressLimits { connections: 7, half_open: 1000, exempt: trusted.clone() });
        let limits = with("half_open_per_address_max", "1").unwrap();
        assert_eq!(limits, AddressLimits { connections: 5000, half_open: 1, exempt: trusted });
        for key in ["connections_per_address_max", "half_open_per_address_max"] {
            assert!(with(key, "0").is_err_and(|problems| problems[0].contains(key)), "{key}");
        }
    }

    #[test]
    fn hedging_and_spillover_can_be_disabled() {
        let example = include_str!("../../../configs/gateway.toml");
        for key in ["hedge", "spill"] {
            let on = format!("{key} = true");
            assert!(example.contains(&on), "{key}");
            let with = |line: &str| {
                parse(&example.replace(&on, line))
                    .map(|config| if key == "hedge" { config.hedge } else { config.spill })
            };
            assert_eq!(
                (with(""), with(&on), with(&format!("{key} = false"))),
                (Ok(true), Ok(true), Ok(false))
            );
            assert!(with(&format!("{key} = 2")).is_err_and(|problems| problems[0].contains(key)));
        }
    }

    #[test]
    fn commented_keys_of_the_example_are_known() {
        let text = include_str!("../../../configs/gateway.toml").replace("# handover", "handover");
        let text = ["[tls]", "[region_tls]", "certificate =", "key =", "region_ca ="]
            .into_iter()
            .fold(text, |text, key| text.replace(&format!("# {key}"), key));
        let problems = parse(&text).err().expect("the files are missing");
        assert!(problems.iter().all(|problem| problem.contains("cannot be read")), "{problems:#?}");
        assert_eq!(problems.len(), 5, "{problems:#?}");
    }

    #[test]
    fn region_tls_needs_all_files_or_insecure() {
        let with = |table: &str| {
            let text = include_str!("../../../configs/gateway.toml");
            parse(&text.replace("[timeouts]", &format!("{table}\n[timeouts]"))).map(|config| config.regions)
        };
        assert!(matches!(with(""), Ok(RegionTransport::Loopback)));
        assert!(matches!(with("[region_tls]\ninsecure = true"), Ok(RegionTransport::Plaintext)));
        let files = "[region_tls]\ncertificate = \"no.crt\"\nkey = \"no.key\"\nregion_ca = \"no.ca\"\n";
        let both = format!("{files}insecure = true");
        for half in ["[region_tls]", "[region_tls]\nkey = \"no.key\"", &both] {
            let problems = with(half).expect_err(half);
            assert!(problems.len() == 1 && problems[0].contains("[region_tls] needs"), "{problems:#?}");
        }
        let problems = with(files).expect_err("no files");
        let keys = ["region_tls.certificate", "region_tls.key", "region_tls.region_ca"];
        assert!(problems.iter().zip(keys).all(|(problem, key)| problem.contains(key)), "{problems:#?}");
        assert_eq!(problems.len(), keys.len(), "{problems:#?}");
    }

    #[test]
    fn region_http_is_1_or_2() {
        let with = |line: &str| {
            let text = include_str!("../../../configs/gateway.toml");
            parse(&text.replace("# region_http = 2", line)).map(|config| config.region_http2)
        };
        assert_eq!(
            (with(""), with("region_http = 1"), with("region_http = 2")),
            (Ok(false), Ok(false), Ok(true))
        );
        assert!(with("region_http = 3").is_err_and(|problems| problems[0].contains("region_http = 3")));
    }

    #[test]
    fn all_problems_are_reported_at_once() {
        let problems = parse(
            r#"
            listen = "8080"
            operations = "localhost"
            region = "aws/atlantis-1"
            hub = "hub.internal"
            snapshot = "routes"
            trusted_peers = ["localhost"]
            tenants = "missing.toml"
            receipts = { dir = "receipts" }
            tls = { certificate = "no.crt", key = "no.key" }
            timeouts = { idle = "soon" }
            connections_max = 0
            policy_max_age = "7"
            "#,
        )
        .err()
        .expect("many problems");
        for key in [
            "listen",
            "operations",
            "region",
            "hub",
            "trusted_peers",
            "missing.toml",
            "no.crt",
            "no.key",
            "timeouts.idle",
            "receipts",
            "policy_max_age",
        ] {
            assert!(problems.iter().any(|problem| problem.contains(key)), "{key} in {problems:#?}");
        }
        assert_eq!(problems.len(), 12, "{problems:#?}");
    }

    #[test]
    fn the_key_of_receipts_has_one_source_and_a_minimum_length() {
        let example = include_str!("../../../configs/gateway.toml");
        let config = parse(example).map_err(|problems| problems.join("\n")).unwrap();
        let receipts = config.receipts.expect("the example has receipts");
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
