//! Parser of `hub.toml`.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use regions::{Catalogue, Deployment, parse_deployments};
use scheduler_core::access::Tokens;
use scheduler_core::registry::LAPSED_KEEP;
use scheduler_core::rollout::{READER_TIMEOUT, SETTLE_TIME};
use scheduler_core::token::Token;
use serde::Deserialize;

use super::store::{self, RawStore, StoreConfig};
use super::{Problems, raw};

/// Lease time of a registration, and of a leader's term, and so the longest time without a leader after one dies. etcd checks leases twice a second at best, and holds them for at least two seconds;
/// with less, a short stall of either side would expire them.
pub const LEASE_TTL: Duration = Duration::from_secs(5);

/// Configuration file, as parsed.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawConfig {
    listen: Option<String>,
    data: Option<PathBuf>,
    deployments: Option<PathBuf>,
    operator_token_file: Option<PathBuf>,
    operator_token_env: Option<String>,
    fleet_token_file: Option<PathBuf>,
    fleet_token_env: Option<String>,
    catalogue: Option<PathBuf>,
    store: Option<RawStore>,
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
    /// Tokens of operators, and of gateways and spokes. Without a fleet token the hub listens on loopback only.
    pub tokens: Tokens,
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
    pub fn parse(text: &str, base: &Path) -> Result<HubConfig, Vec<String>> {
        let raw: RawConfig = raw(text)?;
        let RawConfig {
            listen,
            data,
            deployments,
            operator_token_file,
            operator_token_env,
            fleet_token_file,
            fleet_token_env,
            catalogue,
            store,
        } = raw;
        let mut problems = Problems::default();
        let listen = problems.address("listen", listen);
        let store = store::read(&mut problems, store, data, base);
        let catalogue = problems.catalogue(catalogue, base);
        let deployments = deployments.map_or(Some(Vec::new()), |path| {
            let path = base.join(path);
            let text = problems.file("deployments", &path)?;
            parse_deployments(&text, catalogue.as_ref()?)
                .map_err(|found| problems.in_file(&path, &found))
                .ok()
        });
        let operator =
            problems.token("operator_token", operator_token_file, operator_token_env, base, Token::read);
        let names_fleet_token = fleet_token_file.is_some() || fleet_token_env.is_some();
        let fleet = problems.token("fleet_token", fleet_token_file, fleet_token_env, base, Token::read_all);
        // An unreadable token is reported by itself.
        let misses_token = fleet.is_none() && !names_fleet_token;
        let tokens = Tokens { fleet: fleet.unwrap_or_default(), operator };
        if let Some(Err(problem)) = listen.filter(|_| misses_token).map(|at| tokens.may_listen_at(at.ip())) {
            problems.note(format!("listen: {problem}"));
        }
        match (listen, store, deployments, catalogue) {
            (Some(listen), Some(store), Some(deployments), Some(catalogue)) if problems.0.is_empty() => {
                Ok(HubConfig {
                    listen,
                    store,
                    deployments,
                    tokens,
                    catalogue: Arc::new(catalogue),
                    lease_ttl: LEASE_TTL,
                    lapsed_keep: LAPSED_KEEP,
                    reader_keep: READER_TIMEOUT,
                    settle: SETTLE_TIME,
                })
            }
            _ => Err(problems.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = include_str!("../../../configs/hub.toml");

    fn configs() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs")
    }

    #[test]
    fn example_configuration_is_valid() {
        let config = HubConfig::parse(EXAMPLE, &configs()).map_err(|problems| problems.join("\n")).unwrap();
        assert_eq!(config.listen.to_string(), "127.0.0.1:7000");
        let StoreConfig::Embedded { data } = config.store else { panic!("{:?}", config.store) };
        assert_eq!(data, configs().join("hub-data"));
        assert!(!config.deployments.is_empty());
    }

    #[test]
    fn unknown_keys_are_rejected_by_name() {
        let problems =
            HubConfig::parse(&EXAMPLE.replace("data =", "dta ="), &configs()).unwrap_err().join("\n");
        assert!(problems.contains("dta"), "{problems}");
    }

    #[test]
    fn operator_token_has_one_source_and_a_minimum_length() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("token"), "0123456789abcdef\n").unwrap();
        std::fs::write(dir.path().join("short"), "0123456789abcde").unwrap();
        let parse = |line: &str| {
            let text = format!("listen = \"127.0.0.1:0\"\ndata = \"d\"\n{line}");
            HubConfig::parse(&text, dir.path()).map(|config| config.tokens.operator.is_some())
        };
        assert_eq!(parse(""), Ok(false));
        assert_eq!(parse("operator_token_file = \"token\""), Ok(true));
        let check = |line: &str, part: &str| {
            let problems = parse(line).expect_err(line);
            assert!(problems.len() == 1 && problems[0].contains(part), "{part} in {problems:?}");
        };
        check("operator_token_file = \"short\"", "has 15 bytes, not 16");
        check("operator_token_file = \"gone\"", "cannot be read");
        check("operator_token_env = \"NOT_SET_ANYWHERE\"", "not set in the environment");
        check("operator_token_file = \"token\"\noperator_token_env = \"X\"", "both set");
        check("fleet_token_file = \"short\"", "fleet_token_file = ");
    }

    #[test]
    fn a_hub_that_other_machines_can_reach_needs_a_fleet_token() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("token"), "0123456789abcdef\n").unwrap();
        let parse = |listen: &str, more: &str| {
            let text = format!("listen = \"{listen}\"\ndata = \"d\"\n{more}");
            HubConfig::parse(&text, dir.path()).map(|config| config.tokens.fleet.len())
        };
        for loopback in ["127.0.0.1:7000", "[::1]:7000"] {
            assert_eq!(parse(loopback, ""), Ok(0), "{loopback}");
        }
        for open in ["0.0.0.0:7000", "[::]:7000", "10.0.0.5:7000"] {
            assert_eq!(parse(open, "fleet_token_file = \"token\""), Ok(1), "{open}");
            let problems = parse(open, "").unwrap_err();
            assert!(problems.len() == 1 && problems[0].contains("set fleet_token_file"), "{problems:?}");
            let problems = parse(open, "fleet_token_file = \"gone\"").unwrap_err();
            assert!(problems.len() == 1 && problems[0].contains("gone"), "{problems:?}");
        }
    }

    #[test]
    fn all_problems_are_reported_together() {
        let check = |text: &str, base: &Path, expected: &[&str]| {
            let problems = HubConfig::parse(text, base).expect_err(text);
            assert_eq!(problems.len(), expected.len(), "{problems:#?}");
            for (problem, part) in problems.iter().zip(expected) {
                assert!(problem.contains(part), "{part} in {problem}");
            }
        };
        check("", &configs(), &["listen is missing", "data is missing"]);
        let base = tempfile::tempdir().unwrap();
        std::fs::write(base.path().join("wrong.toml"), "[[deployment]]\nname = \"a b\"\ntasc = \"embed\"\n")
            .unwrap();
        let text =
            "listen = \"7000\"\ndata = \"d\"\ncatalogue = \"none.toml\"\ndeployments = \"gone.toml\"\n";
        check(text, base.path(), &["listen = \"7000\"", "none.toml", "gone.toml"]);
        let text = "listen = \"127.0.0.1:0\"\ndata = \"d\"\ndeployments = \"wrong.toml\"\n";
        let problems = HubConfig::parse(text, base.path()).unwrap_err().join("\n");
        for part in ["wrong.toml: line 2", "a b", "wrong.toml: line 3", "tasc", "model"] {
            assert!(problems.contains(part), "{part} in {problems}");
        }
    }
}
