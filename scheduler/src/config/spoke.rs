//! Parser of `spoke.toml`.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use regions::{Catalogue, RegionId};
use scheduler_core::hubs::{Hubs, RawHubs};
use scheduler_core::policy_age;
use scheduler_core::spoke::Spoke;
use scheduler_core::token::Token;
use serde::Deserialize;

use super::scaling::{REPLICAS_MAX, RawScaling, ScalingConfig};
use super::{Problems, raw};

/// Configuration file, as parsed.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawConfig {
    region: Option<String>,
    listen: Option<String>,
    advertise: Option<String>,
    hub: Option<RawHubs>,
    fleet_token_file: Option<PathBuf>,
    fleet_token_env: Option<String>,
    policy_max_age: Option<String>,
    catalogue: Option<PathBuf>,
    receipts: Option<Receipts>,
    operations: Option<String>,
    tls: Option<RawTls>,
    scaling: Option<RawScaling>,
    #[serde(default)]
    replica: Vec<RawReplica>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawReplica {
    endpoint: String,
}

/// `[receipts]`, for the ingress, which validates it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Receipts {
    /// Folder of the receipt files.
    pub dir: PathBuf,
    /// File with the key for tenants' pseudonyms,
    pub key_file: Option<PathBuf>,
    /// or the environment variable with that key.
    pub key_env: Option<String>,
    /// Whether requests of locked deployments are rejected when their receipts cannot be stored.
    #[serde(default)]
    pub required: bool,
}

/// `[tls]`, as parsed.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTls {
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
    client_ca: Option<PathBuf>,
    #[serde(default)]
    insecure: bool,
}

/// Files of `[tls]`, for the ingress, which reads them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificate of the ingress.
    pub certificate: PathBuf,
    /// Private key of the ingress.
    pub key: PathBuf,
    /// Certificates of the CAs that sign gateways' certificates.
    pub client_ca: PathBuf,
}

/// Configuration of a spoke: ingress, agent and scaler.
#[derive(Clone, Debug)]
pub struct SpokeConfig {
    /// Region of the spoke.
    pub region: RegionId,
    /// Listen address of the ingress.
    pub listen: SocketAddr,
    /// Address at which gateways reach the ingress.
    pub advertise: SocketAddr,
    /// The hubs.
    pub hub: Hubs,
    /// Token sent to the hubs.
    pub fleet: Option<Token>,
    /// Requests of locked deployments are rejected if no hub has confirmed the route table for longer.
    pub policy_max_age: Duration,
    /// Addresses of the replicas in the file.
    pub replicas: Vec<SocketAddr>,
    /// Clouds and regions.
    pub catalogue: Arc<Catalogue>,
    /// Storage of receipts, if they are stored.
    pub receipts: Option<Receipts>,
    /// Listen address for operators; by default that of the ingress.
    pub operations: Option<SocketAddr>,
    /// TLS files of the ingress; without them it uses plaintext.
    pub tls: Option<TlsFiles>,
    /// Autoscaling of further replicas, if configured.
    pub scaling: Option<ScalingConfig>,
}

impl SpokeConfig {
    /// Parses the configuration `text`; relative paths are resolved against `base`, and `region` is that of the command
    /// line, which the file may omit.
    ///
    /// # Errors
    ///
    /// All problems, each with the key, the value and the fix.
    pub fn parse(text: &str, base: &Path, region: Option<&str>) -> Result<SpokeConfig, Vec<String>> {
        let RawConfig {
            region: written,
            listen,
            advertise,
            hub,
            fleet_token_file,
            fleet_token_env,
            policy_max_age,
            catalogue,
            receipts,
            operations,
            tls,
            scaling,
            replica,
        } = raw(text)?;
        let mut problems = Problems::default();
        let catalogue = problems.catalogue(catalogue, base);
        let region = problems.one_region(written, region);
        let region = region.and_then(|region| problems.known_region(&region, catalogue.as_ref()?));
        let listen = problems.address("listen", listen);
        let advertise = problems.reachable("advertise", advertise);
        let hub = problems.need("hub", hub, "\"http://HOST:PORT\", or a list of such");
        let hub = hub.and_then(|hub| Hubs::read(hub).map_err(|found| problems.0.extend(found)).ok());
        let fleet = problems.token("fleet_token", fleet_token_file, fleet_token_env, base, Token::read);
        let policy_max_age = policy_age::read_max_age(policy_max_age.as_deref());
        let policy_max_age = policy_max_age.unwrap_or_else(|problem| {
            problems.note(problem);
            policy_age::POLICY_MAX_AGE
        });
        let operations = operations.and_then(|address| problems.address("operations", Some(address)));
        let tls = problems.tls(tls, base, [("listen", listen), ("advertise", advertise)]);
        let replicas = problems.replicas(replica);
        let scaling = problems.scaling(scaling, base, replicas.len());
        match (region, listen, advertise, hub, catalogue) {
            (Some(region), Some(listen), Some(advertise), Some(hub), Some(catalogue))
                if problems.0.is_empty() =>
            {
                let catalogue = Arc::new(catalogue);
                Ok(SpokeConfig {
                    region,
                    listen,
                    advertise,
                    hub,
                    fleet,
                    policy_max_age,
                    replicas,
                    catalogue,
                    receipts,
                    operations,
                    tls,
                    scaling,
                })
            }
            _ => Err(problems.0),
        }
    }

    /// Returns the region's state before any replica has reported. `boot_id` is random at every start of a spoke.
    pub fn spoke(&self, boot_id: u64) -> Spoke {
        let mut spoke = Spoke::new(self.region.clone(), boot_id, self.replicas.clone());
        spoke.limit_policy_age(self.policy_max_age, Instant::now());
        spoke
    }
}

impl Problems {
    fn one_region(&mut self, written: Option<String>, typed: Option<&str>) -> Option<String> {
        if let (Some(written), Some(typed)) = (&written, typed)
            && written != typed
        {
            self.note(format!(
                "region = \"{written}\" but --region {typed}; set one of them, or both to the same region"
            ));
            return None;
        }
        let region = written.or_else(|| typed.map(str::to_owned));
        self.need("region", region, "\"CLOUD/NAME\", such as \"gcp/europe-west4\", or pass --region")
    }

    fn known_region(&mut self, text: &str, catalogue: &Catalogue) -> Option<RegionId> {
        let region = text.parse::<RegionId>().ok().filter(|region| catalogue.get(region).is_some());
        if region.is_none() {
            let near = catalogue.nearest_names(text);
            let hint = if near.is_empty() {
                String::new()
            } else {
                format!("; did you mean {}?", near.join(" or "))
            };
            self.note(format!(
                "region = \"{text}\" is not in the catalogue; write the id of one of its regions{hint}"
            ));
        }
        region
    }

    /// Requires TLS, unless both addresses are loopback or the file allows plaintext.
    fn tls(
        &mut self,
        given: Option<RawTls>,
        base: &Path,
        addresses: [(&str, Option<SocketAddr>); 2],
    ) -> Option<TlsFiles> {
        let Some(RawTls { certificate, key, client_ca, insecure }) = given else {
            for (name, address) in addresses {
                if let Some(address) = address.filter(|address| !address.ip().is_loopback()) {
                    self.note(format!(
                        "{name} = \"{address}\" is not a loopback address, and without [tls] requests would be sent in \
                         plaintext; add [tls] with certificate, key and client_ca, or with insecure = true"
                    ));
                }
            }
            return None;
        };
        match (certificate, key, client_ca, insecure) {
            (Some(certificate), Some(key), Some(client_ca), false) => {
                let [certificate, key, client_ca] = [certificate, key, client_ca].map(|path| base.join(path));
                Some(TlsFiles { certificate, key, client_ca })
            }
            (None, None, None, true) => None,
            _ => {
                self.note(
                    "[tls] needs certificate, key and client_ca, or insecure = true and none of the files",
                );
                None
            }
        }
    }

    fn replicas(&mut self, given: Vec<RawReplica>) -> Vec<SocketAddr> {
        if given.len() > REPLICAS_MAX {
            self.note(format!(
                "{} [[replica]] are too many; a spoke has at most {REPLICAS_MAX}",
                given.len()
            ));
            return Vec::new();
        }
        let mut known = BTreeSet::new();
        let mut replicas = Vec::new();
        for (index, RawReplica { endpoint }) in given.into_iter().enumerate() {
            let key = format!("endpoint of [[replica]] {}", index + 1);
            let Some(address) = self.reachable(&key, Some(endpoint)) else { continue };
            if known.insert(address) {
                replicas.push(address);
            } else {
                self.note(format!(
                    "{key} = \"{address}\" is the endpoint of another replica; remove one of them"
                ));
            }
        }
        replicas
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = include_str!("../../../configs/spoke.toml");

    fn parse(text: &str, region: Option<&str>) -> Result<SpokeConfig, String> {
        SpokeConfig::parse(text, Path::new("."), region).map_err(|problems| problems.join("\n"))
    }

    #[test]
    fn example_configuration_is_valid() {
        let config = parse(EXAMPLE, Some("gcp/europe-west4")).unwrap();
        assert_eq!(
            (config.region.as_str(), config.hub.current()),
            ("gcp/europe-west4", "http://127.0.0.1:7000")
        );
        assert_eq!((config.advertise.port(), config.replicas.len()), (7100, 1));
        assert_eq!(config.spoke(7).boot_id(), 7);
    }

    #[test]
    fn unknown_keys_are_rejected_by_name() {
        for (key, wrong) in [("advertise =", "advertize ="), ("endpoint =", "endpiont =")] {
            let problems = parse(&EXAMPLE.replace(key, wrong), None).unwrap_err();
            assert!(problems.contains(wrong.trim_end_matches(" =")), "{problems}");
        }
    }

    #[test]
    fn region_is_set_in_the_file_or_on_the_command_line() {
        let without = EXAMPLE.replace("region = \"gcp/europe-west4\"", "");
        assert_eq!(parse(&without, Some("aws/us-east-1")).unwrap().region.as_str(), "aws/us-east-1");
        assert!(parse(&without, None).unwrap_err().contains("region is missing"));
        let problems = parse(EXAMPLE, Some("aws/us-east-1")).unwrap_err();
        assert!(problems.contains("gcp/europe-west4") && problems.contains("aws/us-east-1"), "{problems}");
    }

    #[test]
    fn all_problems_are_reported_together() {
        let check = |text: &str, expected: &[&str]| {
            let problems = SpokeConfig::parse(text, Path::new("."), None).expect_err(text);
            assert_eq!(problems.len(), expected.len(), "{problems:#?}");
            for (problem, part) in problems.iter().zip(expected) {
                assert!(problem.contains(part), "{part} in {problem}");
            }
        };
        check("", &["region is missing", "listen is missing", "advertise is missing", "hub is missing"]);
        check(
            "region = \"aws/us-esat-1\"\nlisten = \"here\"\nadvertise = \"0.0.0.0:7100\"\nhub = \"hub:7000\"\n\
             catalogue = \"/nowhere.toml\"\n",
            &["/nowhere.toml", "here", "0.0.0.0:7100", "hub:7000"],
        );
        check(
            "region = \"aws/us-esat-1\"\nlisten = \"0.0.0.0:7100\"\nadvertise = \"10.0.0.7:7100\"\n\
             hub = \"https://hub\"\n[[replica]]\nendpoint = \"10.0.0.8:0\"\n[[replica]]\nendpoint = \"10.0.0.8:9\"\n\
             [[replica]]\nendpoint = \"10.0.0.8:9\"\n",
            &[
                "did you mean aws/us-east-1",
                "https://hub",
                "listen = \"0.0.0.0:7100\" is not a loopback address",
                "advertise = \"10.0.0.7:7100\" is not a loopback address",
                "[[replica]] 1",
                "[[replica]] 3",
            ],
        );
    }

    #[test]
    fn commented_keys_of_the_example_are_known_keys() {
        let scaling =
            ["[scaling]", "actuator =", "dir =", "ports =", "address =", "program =", "orphan_timeout ="];
        let keys =
            ["operations =", "[tls]", "certificate =", "key =", "client_ca ="].into_iter().chain(scaling);
        let text = keys
            .fold(EXAMPLE.to_owned(), |text, key| text.replace(&format!("\n# {key}"), &format!("\n{key}")));
        let config = parse(&text, None).unwrap();
        assert!(config.scaling.is_some());
        assert_eq!(config.operations.map(|address| address.port()), Some(7101));
        assert_eq!(config.tls.map(|files| files.client_ca), Some(PathBuf::from("./gateways-ca.crt")));
    }

    #[test]
    fn plaintext_on_a_reachable_address_needs_an_explicit_setting() {
        let with = |address: &str, tls: &str| {
            let text = EXAMPLE.replace("127.0.0.1:7100", address);
            let (head, replicas) = text.split_once("[[replica]]").unwrap();
            let text = format!("{head}\n{tls}\n[[replica]]{replicas}");
            SpokeConfig::parse(&text, Path::new("/etc/meridian"), None).map(|config| config.tls)
        };
        let files = "[tls]\ncertificate = \"spoke.crt\"\nkey = \"spoke.key\"\nclient_ca = \"/ca.crt\"\n";
        assert_eq!(with("127.0.0.1:7100", ""), Ok(None));
        assert_eq!(with("10.0.0.7:7100", "[tls]\ninsecure = true\n"), Ok(None));
        let read = with("10.0.0.7:7100", files).unwrap().unwrap();
        let [certificate, key, client_ca] =
            ["/etc/meridian/spoke.crt", "/etc/meridian/spoke.key", "/ca.crt"].map(PathBuf::from);
        assert_eq!(read, TlsFiles { certificate, key, client_ca });
        let problems = with("10.0.0.7:7100", "").unwrap_err();
        assert!(problems.len() == 2 && problems[0].contains("insecure = true"), "{problems:#?}");
        for half in
            [format!("{files}insecure = true\n"), "[tls]\nkey = \"spoke.key\"\n".into(), "[tls]\n".into()]
        {
            let problems = with("127.0.0.1:7100", &half).unwrap_err();
            assert!(problems.len() == 1 && problems[0].contains("[tls] needs"), "{half}: {problems:#?}");
        }
    }

    #[test]
    fn limit_of_replicas_is_enforced() {
        let text = |replicas: usize| {
            let head = EXAMPLE.split("[[replica]]").next().unwrap().to_owned();
            (1..=replicas).fold(head, |text, n| format!("{text}\n[[replica]]\nendpoint = \"10.0.0.8:{n}\"\n"))
        };
        assert_eq!(parse(&text(REPLICAS_MAX), None).unwrap().replicas.len(), REPLICAS_MAX);
        assert!(parse(&text(REPLICAS_MAX + 1), None).unwrap_err().contains("too many"));
    }
}
