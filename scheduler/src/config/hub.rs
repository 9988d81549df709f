//! Reader of `hub.toml`.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use configuration::{ConfigFile, Environment, Files, Problem, section};
use identity::{IdentitySection, OwnName, Transport};
use regions::spiffe::Role;
use regions::{Catalogue, Deployment, parse_deployments};
use scheduler_core::registry::LAPSED_KEEP;
use scheduler_core::rollout::{READER_TIMEOUT, SETTLE_TIME};
use telemetry::{LogsConfig, LogsSection, MetricsConfig, MetricsSection};

use super::authority::{self, AuthorityConfig, AuthoritySection};
use super::console::{self, ConsoleConfig, ConsoleSection};
use super::operators::{self, OperatorsConfig, OperatorsSection};
use super::store::{self, StoreConfig, StoreSection};

/// Lease time of a registration, and of a leader's term, and so the longest time without a leader after one dies. etcd checks leases twice a second at best, and holds them for at least two seconds;
/// with less, a short stall of either side would expire them.
pub const LEASE_TTL: Duration = Duration::from_secs(5);

section! {
    /// Hub: the control plane, which registers regions and publishes the route table.
    partial struct HubFile {
        /// Listener for spokes, gateways and operators.
        listen: SocketAddr, like "\"IP:PORT\"";
        /// Directory of the embedded store; required unless `store.kind` is `etcd`.
        data: Option<PathBuf>;
        /// Initial deployments, until an operator applies some; none if absent.
        deployments: Option<PathBuf>;
        /// Listener for probes, metrics and `/log`, plaintext; that of the other requests, without `/log`, if absent.
        operations: Option<SocketAddr>;
        /// Identity towards spokes, gateways and operators; without this table the hub listens on loopback only.
        identity: Option<IdentitySection>;
        /// Catalogue of clouds and regions; the built-in one if absent.
        catalogue: Option<PathBuf>;
        /// Store of the hub; the embedded one without this table.
        store: Option<StoreSection>;
        /// Built-in certificate authority; none without this table.
        authority: Option<AuthoritySection>;
        /// Tokens of operators; only certificates without this table.
        operators: Option<OperatorsSection>;
        /// Console for browsers; none without this table.
        console: Option<ConsoleSection>;
        /// Events of the log by OTLP.
        logs: LogsSection;
        /// Metrics by OTLP, beside `/metrics`.
        metrics: MetricsSection;
    }
}

/// Configuration of a hub.
#[derive(Clone, Debug)]
pub struct HubConfig {
    /// Address on which spokes and gateways connect.
    pub listen: SocketAddr,
    /// Where the hub stores its state.
    pub store: StoreConfig,
    /// Deployments until an operator applies some; empty without a file.
    pub deployments: Vec<Deployment>,
    /// Address for probes and metrics, besides the address above.
    pub operations: Option<SocketAddr>,
    /// Transport security of the listener. Without an identity, every client may use every path.
    pub transport: Transport,
    /// Built-in authority, if there is one.
    pub authority: Option<AuthorityConfig>,
    /// Tokens of operators, if they are accepted.
    pub operators: Option<OperatorsConfig>,
    /// Console, if there is one.
    pub console: Option<ConsoleConfig>,
    /// Export of the log, if it is configured.
    pub logs: Option<LogsConfig>,
    /// Export of the metrics, if it is configured.
    pub metrics: Option<MetricsConfig>,
    /// Clouds and regions.
    pub catalogue: Arc<Catalogue>,
    /// Lease time of a registration: [`LEASE_TTL`], or shorter in tests.
    pub lease_ttl: Duration,
    /// Time for which a region without a spoke keeps its route: [`LAPSED_KEEP`], or shorter in tests.
    pub lapsed_keep: Duration,
    /// Time for which rollouts wait for a silent reader: [`READER_TIMEOUT`], or shorter in tests.
    pub reader_keep: Duration,
    /// Time after the start of a term during which no residency is widened: [`SETTLE_TIME`], or shorter in tests.
    pub settle: Duration,
}

impl HubConfig {
    /// Parses the configuration `text` and the files that it names; relative paths are resolved against `base`.
    ///
    /// # Errors
    ///
    /// All problems, each with the key, the value and the fix.
    pub fn parse(text: &str, base: &Path) -> Result<HubConfig, Vec<Problem>> {
        let environment = Environment::of_process();
        let files = Files { base, environment: Some(&environment) };
        ConfigFile::read(text, |document| HubConfig::read(document, &files))
    }

    /// Returns the reference of the keys.
    pub fn reference() -> String {
        configuration::reference::<HubFile>("hub.toml")
    }

    /// Reads the configuration and the files that it names.
    pub fn read(document: &ConfigFile<'_>, files: &Files<'_>) -> Option<HubConfig> {
        let file: HubFile = document.section()?;
        let store = store::read(document, files, file.store, file.data);
        let catalogue = file.catalogue.and_then(|path| match path {
            None => Some(Catalogue::builtin()),
            Some(path) => files.parsed(document, "catalogue", &path, Catalogue::parse),
        });
        let deployments = file.deployments.and_then(|path| match path {
            None => Some(Vec::new()),
            Some(path) => files.parsed(document, "deployments", &path, |text| {
                // An unreadable catalogue is reported by itself.
                catalogue.as_ref().map_or(Ok(Vec::new()), |catalogue| parse_deployments(text, catalogue))
            }),
        });
        let catalogue = catalogue.map(Arc::new);
        let identity_dir =
            file.identity.as_ref().map(|section| section.as_ref().and_then(|section| section.dir.clone()));
        let name = OwnName { roles: &[Role::Hub], region: None };
        let transport = file
            .identity
            .and_then(|section| Transport::read(section, document, files, Some(name), catalogue.as_ref()));
        if let (Some(transport), Some(listen)) = (&transport, file.listen) {
            transport.check_listener(document, "listen", &listen.into());
        }
        let authority =
            file.authority.and_then(|section| authority::read(document, files, section, identity_dir?));
        // An invalid identity is reported by itself.
        let is_tls = transport.as_ref().is_none_or(|transport| transport.identity().is_some());
        let operators = file.operators.and_then(|section| operators::read(document, files, section, is_tls));
        let logs = file.logs.and_then(|section| section.read(document, files));
        let metrics = file.metrics.and_then(|section| section.read(document, files));
        let console = file.console.and_then(|section| console::read(document, section, transport.as_ref()));
        Some(HubConfig {
            authority: authority?,
            console: console?,
            logs: logs?,
            metrics: metrics?,
            operators: operators?,
            listen: file.listen?,
            store: store?,
            deployments: deployments?,
            operations: file.operations?,
            transport: transport?,
            catalogue: catalogue?,
            lease_ttl: LEASE_TTL,
            lapsed_keep: LAPSED_KEEP,
            reader_keep: READER_TIMEOUT,
            settle: SETTLE_TIME,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = include_str!("../../../configs/hub.toml");

    fn parse(text: &str, base: &Path) -> Result<HubConfig, Vec<String>> {
        HubConfig::parse(text, base).map_err(|found| found.iter().map(ToString::to_string).collect())
    }

    fn configs() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs")
    }

    #[test]
    fn example_configuration_is_valid() {
        let config = parse(EXAMPLE, &configs()).unwrap();
        assert_eq!(config.listen.to_string(), "127.0.0.1:7000");
        let StoreConfig::Embedded { data } = config.store else { panic!("{:?}", config.store) };
        assert_eq!(data, configs().join("hub-data"));
        assert!(!config.deployments.is_empty());
    }

    #[test]
    fn unknown_keys_are_rejected_by_name() {
        let problems = parse(&EXAMPLE.replace("data =", "dta ="), &configs()).unwrap_err().join("\n");
        assert!(problems.contains("dta"), "{problems}");
    }

    #[test]
    fn a_hub_that_other_machines_can_reach_needs_an_identity() {
        let parse_at = |listen: &str, more: &str| {
            let text = format!("listen = \"{listen}\"\ndata = \"d\"\n{more}");
            parse(&text, &configs()).map(|config| config.transport)
        };
        for loopback in ["127.0.0.1:7000", "[::1]:7000"] {
            assert!(matches!(parse_at(loopback, ""), Ok(Transport::Loopback)), "{loopback}");
        }
        for open in ["0.0.0.0:7000", "[::]:7000", "10.0.0.5:7000"] {
            assert!(
                matches!(parse_at(open, "[identity]\ninsecure = true"), Ok(Transport::Plaintext)),
                "{open}"
            );
            let problems = parse_at(open, "").unwrap_err();
            assert!(problems.len() == 1 && problems[0].contains("add [identity]"), "{problems:?}");
            let problems = parse_at(open, "[identity]\ndir = \"gone\"").unwrap_err();
            assert!(problems.len() == 3 && problems[0].contains("gone"), "{problems:?}");
        }
    }

    #[test]
    fn tokens_of_operators_need_tls_an_issuer_and_one_source_of_keys() {
        let check = |section: &str, expected: &[&str]| {
            let text =
                format!("listen = \"127.0.0.1:1\"\ndata = \"d\"\n[operators]\naudience = \"m\"\n{section}");
            let problems = parse(&text, &configs()).unwrap_err();
            assert_eq!(problems.len(), expected.len(), "{problems:#?}");
            for part in expected {
                assert!(problems.iter().any(|problem| problem.contains(part)), "{part} in {problems:#?}");
            }
        };
        let tls = "needs the identity of the hub";
        check("issuer = \"i\"\njwks_file = \"keys.json\"\n", &[tls]);
        check("issuer = \"i\"\n", &[tls, "needs one of jwks_file and jwks_url"]);
        check("issuer = \"i\"\njwks_url = \"http://h/keys\"\n", &[tls, "is not a URL with https"]);
        check("issuer = \"i\"\njwks_url = \"https://a:b@h/keys\"\n", &[tls, "has a user, a password"]);
        check("issuer = \"i\"\njwks_file = \"k\"\njwks_ca = \"c\"\n", &[tls, "belongs to jwks_url"]);
        check(
            "jwks_file = \"k\"\nleeway = \"6m\"\n",
            &[tls, "issuer: is missing", "leeway: \"6m\" is out of range"],
        );
    }

    #[test]
    fn five_mistakes_in_a_file_and_its_section_are_five_problems_with_their_lines() {
        let text =
            "listen = \"7000\"\ndata = 1\noperations = \"7001\"\n[store]\nkind = \"etcdd\"\nprefix = \"\"\n";
        let problems = parse(text, &configs()).unwrap_err();
        let expected = [
            "line 1: listen: \"7000\" is not an address; write \"IP:PORT\"",
            "line 2: data: 1 is a number; write a string",
            "line 3: operations: \"7001\" is not an address; write",
            "line 5: store.kind: \"etcdd\" is unknown; did you mean etcd?; write \"embedded\" or \"etcd\"",
            "line 6: store.prefix: \"\" is empty; write the prefix",
        ];
        assert_eq!(problems.len(), expected.len(), "{problems:#?}");
        for (problem, part) in problems.iter().zip(expected) {
            assert!(problem.starts_with(part), "{part} in {problem}");
        }
    }

    #[test]
    fn all_problems_are_reported_together() {
        let check = |text: &str, base: &Path, expected: &[&str]| {
            let problems = parse(text, base).expect_err(text);
            assert_eq!(problems.len(), expected.len(), "{problems:#?}");
            for (problem, part) in problems.iter().zip(expected) {
                assert!(problem.contains(part), "{part} in {problem}");
            }
        };
        check("", &configs(), &["data: is missing", "listen: is missing"]);
        let base = tempfile::tempdir().unwrap();
        std::fs::write(base.path().join("wrong.toml"), "[[deployment]]\nname = \"a b\"\ntasc = \"embed\"\n")
            .unwrap();
        let text =
            "listen = \"7000\"\ndata = \"d\"\ncatalogue = \"none.toml\"\ndeployments = \"gone.toml\"\n";
        check(text, base.path(), &["listen: \"7000\"", "none.toml", "gone.toml"]);
        let text = "listen = \"127.0.0.1:0\"\ndata = \"d\"\ndeployments = \"wrong.toml\"\n";
        let problems = parse(text, base.path()).unwrap_err().join("\n");
        for part in ["wrong.toml:2", "a b", "wrong.toml:3", "tasc", "model"] {
            assert!(problems.contains(part), "{part} in {problems}");
        }
    }
}
