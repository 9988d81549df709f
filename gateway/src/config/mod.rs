//! Configuration of a gateway: `gateway.toml`, validated once into [`EdgeConfig`] or a list of all problems. Tenants
//! have a file of their own, `tenants`, which changes more often.

mod bodies;
mod cors;
mod explanations;
mod issuers;
mod jobs;
mod tenants;
mod timeouts;

pub use crate::body_memory::BodyLimits;
pub use jobs::ReaderGateways;
pub(crate) use tenants::TenantsRead;
pub use tenants::{TenantsFile, read_tenants};
pub use timeouts::Timeouts;

use crate::edge::ExplanationsConfig;
pub use crate::listener::admission::AddressLimits;
use crate::listener::admission::{CONNECTIONS_MAX, CONNECTIONS_PER_ADDRESS_MAX, HALF_OPEN_PER_ADDRESS_MAX};
use crate::receipts::ReceiptsConfig;
use crate::tokens::Issuer;
use bodies::BodiesSection;
use configuration::{ConfigFile, Files, Problem, section};
use cors::CorsSection;
use explanations::ExplanationsSection;
use gateway_core::cors::Cors;
use gateway_core::keys::KeyRing;
use identity::certificate::TlsIdentity;
use identity::{IdentitySection, OwnName, Transport};
use jobs::ReadersSection;
use regions::IpNetwork;
use regions::catalogue::Catalogue;
use regions::geography::GeoPoint;
use regions::id::RegionId;
use regions::region_list::find_region;
use regions::spiffe::Role;
use resolver::{DnsSection, Resolver};
use scheduler_client::hub::check_transport;
use scheduler_core::hubs::Hubs;
use scheduler_core::policy_age::{POLICY_MAX_AGE, POLICY_MAX_AGE_MAX, POLICY_MAX_AGE_MIN};
use scheduler_core::receipts::ReceiptsSection;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use telemetry::{LogsConfig, LogsSection, MetricsConfig, MetricsSection, TracingConfig, TracingSection};
use tenants::GatewayTenants;

section! {
    /// Gateway: the edge proxy that clients connect to.
    partial struct GatewayFile {
        /// Listener for clients: HTTP/1.1 and HTTP/2.
        listen: SocketAddr, like "\"127.0.0.1:8080\"";
        /// Listener for operators: `/livez`, `/readyz`, `/routes`, `/metrics`, `/explain/ID`, `/requests`, `/log`.
        operations: SocketAddr, like "\"127.0.0.1:8081\"";
        /// Region at or near this gateway; distances are measured from it.
        region: String, like "\"aws/us-east-1\"";
        /// Hubs that publish the route table.
        hub: Hubs, like "\"http://HOST:PORT\"";
        /// File with the last route table, from which a restart serves without a hub.
        snapshot: PathBuf, like "\"gateway-routes\"";
        /// Maximum age of the route table for requests of deployments with a residency policy, while no hub responds.
        policy_max_age: Duration = POLICY_MAX_AGE, in POLICY_MAX_AGE_MIN..=POLICY_MAX_AGE_MAX;
        /// Peers whose client location header is trusted.
        trusted_peers: Vec<IpAddr> = Vec::new();
        /// Load balancers in front, each of whose connections begins with a PROXY protocol header, version 2. If there are any,
        /// no other peer may connect.
        proxy_protocol_from: Vec<IpNetwork> = Vec::new();
        /// Catalogue of clouds and regions; the built-in one if absent.
        catalogue: Option<PathBuf>;
        /// Tenants with their limits; without a file, only those that are applied.
        tenants: Option<PathBuf>;
        /// Receipts; none are written without this table.
        receipts: Option<ReceiptsSection>;
        /// Explanations on disk; none are kept without this table.
        explanations: Option<ExplanationsSection>;
        /// TLS for clients; plaintext without this table.
        tls: Option<TlsSection>;
        /// Traces by OTLP.
        tracing: TracingSection;
        /// Events of the log by OTLP.
        logs: LogsSection;
        /// Metrics by OTLP, beside `/metrics`.
        metrics: MetricsSection;
        /// Identity towards regions and hubs.
        identity: Option<IdentitySection>;
        /// Resolution of the names of regions and hubs.
        dns: DnsSection;
        /// HTTP version towards regions.
        region_http: u8 = 1, in 1..=2;
        /// Local address of the connections to regions, for hosts with several; the system selects one if absent.
        source_address: Option<IpAddr>;
        /// Socket for upgrades with `--take-over`.
        handover: Option<PathBuf>;
        /// Minimum size in bytes of JSON responses that are compressed; none is if absent.
        gzip_min_bytes: Option<usize>, in GZIP_MIN_BYTES_MIN.., fix "or remove it to disable compression";
        /// Maximum number of open client connections.
        connections_max: usize = CONNECTIONS_MAX, in 1..;
        /// Maximum number of connections per client address, except `trusted_peers`.
        connections_per_address_max: usize = CONNECTIONS_PER_ADDRESS_MAX, in 1..;
        /// The same for connections without a complete request head.
        half_open_per_address_max: usize = HALF_OPEN_PER_ADDRESS_MAX, in 1..;
        /// CORS; no other origin is allowed without this table.
        cors: Option<CorsSection>;
        /// Whether slow interactive requests are hedged in a second region.
        hedge: bool = true;
        /// Whether overflow of the nearest region spills over to a region that has offered credit, and jobs that wait for too
        /// long in the region of their queue are computed in other regions.
        spill: bool = true;
        /// Gateways of other regions, for results that this one may not return.
        jobs: ReadersSection;
        /// Timeouts.
        timeouts: Timeouts;
        /// Limits of request bodies.
        bodies: BodiesSection;
    }
}

section! {
    /// TLS for clients; both files are checked for changes once a second.
    struct TlsSection {
        /// Certificate chain, beginning with the gateway's certificate; PEM.
        certificate: PathBuf, like "\"gateway.crt\"";
        /// Private key of that certificate; PEM.
        key: PathBuf, like "\"gateway.key\"";
    }
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
    /// Path of the last valid route table.
    pub snapshot: PathBuf,
    /// Requests of locked deployments are rejected when the last confirmation of the route table by a hub is older.
    pub policy_max_age: Duration,
    /// Local address of the connections to regions; the system selects one if absent.
    pub source_address: Option<IpAddr>,
    /// Peers whose x-meridian-client-geo header is trusted.
    pub trusted_peers: Vec<IpAddr>,
    /// Load balancers whose connections begin with a PROXY protocol header; without one, clients connect directly.
    pub proxy_protocol_from: Vec<IpNetwork>,
    /// Certificate for clients; without it, clients connect over plaintext HTTP.
    pub tls: Option<Arc<TlsIdentity>>,
    /// Transport security of connections to regions and hubs.
    pub transport: Transport,
    /// Resolution of names.
    pub dns: DnsSection,
    /// Resolver that other parts of the process use too, so that its metrics count all lookups; without it, the gateway
    /// creates one. Set by the process, not by the file.
    pub resolver: Option<Resolver>,
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
    /// Gateways of other regions, for results that this one may not return.
    pub readers: ReaderGateways,
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
    /// Explanations on disk, if they are configured.
    pub explanations: Option<ExplanationsConfig>,
    /// Traces, if they are configured.
    pub tracing: Option<TracingConfig>,
    /// Export of the log, if it is configured.
    pub logs: Option<LogsConfig>,
    /// Export of the metrics, if it is configured.
    pub metrics: Option<MetricsConfig>,
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
    ) -> Result<EdgeConfig, Vec<Problem>> {
        let environment = environment.iter().collect();
        let files = Files { base, environment: Some(&environment) };
        ConfigFile::read(text, |document| EdgeConfig::read(document, &files))
    }

    /// Returns the reference of the keys of `gateway.toml` and of a gateway's tenants.
    pub fn reference() -> [String; 2] {
        [
            configuration::reference::<GatewayFile>("gateway.toml"),
            configuration::reference::<GatewayTenants>("tenants.toml"),
        ]
    }

    /// Reads the configuration and the files that it names.
    pub fn read(document: &ConfigFile<'_>, files: &Files<'_>) -> Option<EdgeConfig> {
        let file: GatewayFile = document.section()?;
        let catalogue = file.catalogue.and_then(|path| match path {
            None => Some(Catalogue::builtin()),
            Some(path) => files.parsed(document, "catalogue", &path, Catalogue::parse),
        });
        let catalogue = catalogue.map(Arc::new);
        let region = file.region.zip(catalogue.as_ref()).and_then(|(text, catalogue)| {
            let found = find_region(&text, catalogue).map_err(|problem| document.problem("region", problem));
            found.ok().and_then(|id| Some((catalogue.get(&id)?.point, id)))
        });
        // Without a tenants file the tenants are those that an operator applies.
        let tenants = file.tenants.flatten().zip(catalogue.as_ref()).and_then(|(path, catalogue)| {
            let tenants = TenantsFile::new(files.path(&path), files, catalogue);
            let read = files.parsed(document, "tenants", &path, |text| tenants.parse(text))?;
            Some((tenants, read))
        });
        let receipts = file.receipts.flatten();
        let receipts = receipts.and_then(|section| ReceiptsConfig::read(section, document, files));
        let explanations = file.explanations.flatten().map(|section| section.read(files));
        let tls = file.tls.flatten().and_then(|TlsSection { certificate, key }| {
            let loaded = TlsIdentity::load(files.path(certificate), files.path(key));
            loaded.map_err(|found| document.problems_by_key(found)).ok().map(Arc::new)
        });
        let name = region.as_ref().map(|(_, region)| OwnName::of(&[Role::Gateway], region));
        let transport = file
            .identity
            .and_then(|section| Transport::read(section, document, files, name, catalogue.as_ref()));
        if let (Some(hub), Some(transport)) = (&file.hub, &transport)
            && let Err(problem) = check_transport(hub, transport)
        {
            document.problem("hub", problem);
        }
        let cors = file.cors.flatten().and_then(|section| section.read(document));
        let readers = file.jobs.zip(catalogue.as_ref());
        let readers = readers.and_then(|(section, catalogue)| section.read(document, catalogue));
        let total = file.timeouts.unwrap_or_default().body;
        let bodies = file.bodies.and_then(|section| section.read(document, total));
        let tracing = file.tracing.and_then(|section| section.read(document, files));
        let logs = file.logs.and_then(|section| section.read(document, files));
        let metrics = file.metrics.and_then(|section| section.read(document, files));
        let trusted_peers = file.trusted_peers?;
        let (point, region) = region?;
        let (tenants, read) = tenants.unzip();
        let (keys, issuers) = read.map(|read| (read.keys, read.issuers)).unwrap_or_default();
        Some(EdgeConfig {
            listen: file.listen?,
            operations: file.operations?,
            region,
            point,
            hub: file.hub?,
            snapshot: files.path(file.snapshot?),
            policy_max_age: file.policy_max_age?,
            tls,
            transport: transport?,
            dns: file.dns?,
            resolver: None,
            region_http2: file.region_http? == 2,
            source_address: file.source_address?,
            handover: file.handover?.map(|path| files.path(path)),
            take_over: false,
            gzip_min_bytes: file.gzip_min_bytes?,
            connections_max: file.connections_max?,
            addresses: AddressLimits {
                connections: file.connections_per_address_max?,
                half_open: file.half_open_per_address_max?,
                exempt: trusted_peers.iter().map(IpAddr::to_canonical).collect(),
            },
            trusted_peers,
            proxy_protocol_from: file.proxy_protocol_from?,
            cors,
            hedge: file.hedge?,
            spill: file.spill?,
            readers: readers?,
            timeouts: file.timeouts?,
            bodies: bodies?,
            tenants,
            keys,
            issuers,
            catalogue: catalogue?,
            receipts,
            explanations,
            tracing: tracing?,
            logs: logs?,
            metrics: metrics?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<EdgeConfig, Vec<String>> {
        let environment = [("MERIDIAN_KEY", "s3cret"), ("MERIDIAN_RECEIPTS_KEY", "0123456789abcdef")];
        let environment = environment.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let parsed = EdgeConfig::parse(text, Path::new("../configs"), &environment);
        parsed.map_err(|found| found.iter().map(ToString::to_string).collect())
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
        let text = ["[tls]", "[identity]", "certificate =", "key =", "dir ="]
            .into_iter()
            .fold(text, |text, key| text.replace(&format!("# {key}"), key));
        let problems = parse(&text).err().expect("the files are missing");
        assert!(problems.iter().all(|problem| problem.contains("cannot be read")), "{problems:#?}");
        assert_eq!(problems.len(), 5, "{problems:#?}");
    }

    #[test]
    fn identity_needs_a_directory_all_files_or_insecure() {
        let with = |table: &str| {
            let text = include_str!("../../../configs/gateway.toml");
            parse(&text.replace("[timeouts]", &format!("{table}\n[timeouts]"))).map(|config| config.transport)
        };
        assert!(matches!(with("").unwrap(), Transport::Loopback));
        assert!(matches!(with("[identity]\ninsecure = true"), Ok(Transport::Plaintext)));
        let files = "[identity]\ncertificate = \"no.crt\"\nkey = \"no.key\"\nauthorities = \"no.ca\"\n";
        let both = format!("{files}insecure = true");
        for half in ["[identity]", "[identity]\nkey = \"no.key\"", &both] {
            let problems = with(half).expect_err(half);
            assert!(problems.len() == 1 && problems[0].contains("identity: needs"), "{problems:#?}");
        }
        for files in [files, "[identity]\ndir = \"no\""] {
            let problems = with(files).expect_err("no files");
            let keys = ["identity.authorities", "identity.certificate", "identity.key"];
            let is_named = |key: &str| problems.iter().any(|problem| problem.contains(key));
            assert!(keys.into_iter().all(is_named), "{problems:#?}");
            assert_eq!(problems.len(), keys.len(), "{problems:#?}");
        }
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
        assert!(with("region_http = 3").is_err_and(|problems| {
            problems[0].contains("region_http: 3 is out of range; write a whole number from 1 to 2")
        }));
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
    fn five_mistakes_in_five_sections_are_five_problems_with_their_lines() {
        let mut text = include_str!("../../../configs/gateway.toml").to_owned();
        for (from, to) in [
            ("listen = \"127.0.0.1:8080\"", "listen = \"8080\""),
            ("idle = \"75s\"", "idel = \"75s\""),
            ("dir = \"receipts\"", "dir = 7"),
            (
                "# [cors]\n# origins = [\"https://app.example.com\"]",
                "[cors]\norigins = [\"app.example.com\"]",
            ),
            ("# [bodies]\n# bytes_max = 536870912", "[bodies]\nbytes_max = 1024"),
        ] {
            assert!(text.contains(from), "{from}");
            text = text.replace(from, to);
        }
        let problems = parse(&text).err().expect("five problems");
        let expected = [
            ("listen = \"8080\"", "listen: \"8080\" is not an address; write \"IP:PORT\""),
            ("origins = [\"app", "cors.origins: \"app.example.com\" is not an origin; write scheme"),
            ("idel =", "timeouts.idel: unknown key `idel`; did you mean idle?"),
            (
                "bytes_max = 1024",
                "bodies.bytes_max: 1024 is out of range; write a whole number, 33554432 or more",
            ),
            ("dir = 7", "receipts.dir: 7 is a number; write a string"),
        ];
        assert_eq!(problems.len(), expected.len(), "{problems:#?}");
        for (problem, (at, part)) in problems.iter().zip(expected) {
            let line = 1 + text.lines().position(|line| line.starts_with(at)).expect(at);
            assert!(problem.starts_with(&format!("line {line}: {part}")), "{line} {part} in {problem}");
        }
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
