//! `spoke.toml`.

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

use super::scaling::{RawScaling, ScalingConfig};
use super::{Problems, raw};

/// Replicas behind one spoke: each is asked for its status five times a second by one process.
pub const REPLICAS_MAX: usize = 256;

/// The file, as written.
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

/// `[receipts]`, for the ingress, which keeps them: what stands in it is read there.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Receipts {
    /// The folder of their files.
    pub dir: PathBuf,
    /// The file with the key of tenants' pseudonyms,
    pub key_file: Option<PathBuf>,
    /// or the variable that holds it.
    pub key_env: Option<String>,
    /// Whether requests of locked deployments are refused when their receipts cannot be kept.
    #[serde(default)]
    pub required: bool,
}

/// `[tls]`, as written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTls {
    certificate: Option<PathBuf>,
    key: Option<PathBuf>,
    client_ca: Option<PathBuf>,
    #[serde(default)]
    insecure: bool,
}

/// The files of `[tls]`, for the ingress, which reads them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The door's certificate.
    pub certificate: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// The authorities that may name gateways.
    pub client_ca: PathBuf,
}

/// What a spoke needs to know: its ingress and its agent.
#[derive(Clone, Debug)]
pub struct SpokeConfig {
    /// The region whose spoke it is.
    pub region: RegionId,
    /// Where the ingress listens.
    pub listen: SocketAddr,
    /// Where gateways reach it.
    pub advertise: SocketAddr,
    /// The hubs that may be asked.
    pub hub: Hubs,
    /// What it shows them.
    pub fleet: Option<Token>,
    /// Requests of locked deployments are rejected when no hub has confirmed the route table for longer.
    pub policy_max_age: Duration,
    /// Where its replicas are.
    pub replicas: Vec<SocketAddr>,
    /// Clouds and regions.
    pub catalogue: Arc<Catalogue>,
    /// How receipts are kept, if they are.
    pub receipts: Option<Receipts>,
    /// Where operators connect; without it, where gateways do.
    pub operations: Option<SocketAddr>,
    /// What the door shows to gateways and whom it believes; without it, it is in the clear.
    pub tls: Option<TlsFiles>,
    /// Who starts and stops replicas beside those that the file names, if anybody does.
    pub scaling: Option<ScalingConfig>,
}

impl SpokeConfig {
    /// Reads the configuration `text`; relative paths are taken from `base`, and `region` is that of the command line,
    /// which the file may leave out.
    ///
    /// # Errors
    ///
    /// Every problem at once, each naming the key, the value and what to write instead.
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

    /// The region's view of itself, before it has heard any replica. `boot_id` is drawn anew whenever a spoke starts.
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
                "region = \"{written}\" but --region {typed}; give one of them, or both the same"
            ));
            return None;
        }
        let region = written.or_else(|| typed.map(str::to_owned));
        self.need("region", region, "\"CLOUD/NAME\", as \"gcp/europe-west4\", or give --region")
    }

    fn known_region(&mut self, text: &str, catalogue: &Catalogue) -> Option<RegionId> {
        let region = text.parse::<RegionId>().ok().filter(|region| catalogue.get(region).is_some());
        if region.is_none() {
            let near = catalogue.nearest_names(text);
            let hint =
                if near.is_empty() { String::new() } else { format!(", perhaps {}", near.join(" or ")) };
            self.note(format!(
                "region = \"{text}\" is no region of the catalogue; write one of its ids{hint}"
            ));
        }
        region
    }

    /// In the clear only where nothing leaves the machine, or where somebody has written that it may.
    fn tls(
        &mut self,
        given: Option<RawTls>,
        base: &Path,
        doors: [(&str, Option<SocketAddr>); 2],
    ) -> Option<TlsFiles> {
        let Some(RawTls { certificate, key, client_ca, insecure }) = given else {
            for (name, door) in doors {
                if let Some(door) = door.filter(|door| !door.ip().is_loopback()) {
                    self.note(format!(
                        "{name} = \"{door}\" is not of this machine, and without [tls] requests would come there in the \
                         clear; give [tls] a certificate, a key and client_ca, or insecure = true"
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
                self.note("[tls] needs certificate, key and client_ca, or insecure = true and none of them");
                None
            }
        }
    }

    fn replicas(&mut self, given: Vec<RawReplica>) -> Vec<SocketAddr> {
        if given.len() > REPLICAS_MAX {
            self.note(format!("{} [[replica]] are too many for one spoke; {REPLICAS_MAX} fit", given.len()));
            return Vec::new();
        }
        let mut known = BTreeSet::new();
        let mut replicas = Vec::new();
        for (place, RawReplica { endpoint }) in given.into_iter().enumerate() {
            let key = format!("endpoint of [[replica]] {}", place + 1);
            let Some(address) = self.reachable(&key, Some(endpoint)) else { continue };
            if known.insert(address) {
                replicas.push(address);
            } else {
                self.note(format!("{key} = \"{address}\" is that of another replica; give it once"));
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
    fn the_example_that_people_edit_is_a_valid_configuration() {
        let config = parse(EXAMPLE, Some("gcp/europe-west4")).unwrap();
        assert_eq!(
            (config.region.as_str(), config.hub.current()),
            ("gcp/europe-west4", "http://127.0.0.1:7000")
        );
        assert_eq!((config.advertise.port(), config.replicas.len()), (7100, 1));
        assert_eq!(config.spoke(7).boot_id(), 7);
    }

    #[test]
    fn a_key_that_nobody_knows_is_refused_by_name() {
        for (key, wrong) in [("advertise =", "advertize ="), ("endpoint =", "endpiont =")] {
            let problems = parse(&EXAMPLE.replace(key, wrong), None).unwrap_err();
            assert!(problems.contains(wrong.trim_end_matches(" =")), "{problems}");
        }
    }

    #[test]
    fn the_region_may_stand_in_the_file_or_on_the_command_line() {
        let without = EXAMPLE.replace("region = \"gcp/europe-west4\"", "");
        assert_eq!(parse(&without, Some("aws/us-east-1")).unwrap().region.as_str(), "aws/us-east-1");
        assert!(parse(&without, None).unwrap_err().contains("region is missing"));
        let problems = parse(EXAMPLE, Some("aws/us-east-1")).unwrap_err();
        assert!(problems.contains("gcp/europe-west4") && problems.contains("aws/us-east-1"), "{problems}");
    }

    #[test]
    fn all_problems_are_told_at_once() {
        let check = |text: &str, wanted: &[&str]| {
            let problems = SpokeConfig::parse(text, Path::new("."), None).expect_err(text);
            assert_eq!(problems.len(), wanted.len(), "{problems:#?}");
            for (problem, part) in problems.iter().zip(wanted) {
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
                "perhaps aws/us-east-1",
                "https://hub",
                "listen = \"0.0.0.0:7100\" is not of this machine",
                "advertise = \"10.0.0.7:7100\" is not of this machine",
                "[[replica]] 1",
                "[[replica]] 3",
            ],
        );
    }

    #[test]
    fn what_stands_in_the_example_as_a_comment_is_a_key_that_is_known() {
        let scaling = ["[scaling]", "actuator =", "dir =", "ports =", "address =", "program =", "alone ="];
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
    fn a_door_that_others_can_reach_is_in_the_clear_only_where_somebody_wrote_so() {
        let with = |door: &str, tls: &str| {
            let text = EXAMPLE.replace("127.0.0.1:7100", door);
            let (head, replicas) = text.split_once("[[replica]]").unwrap();
            let text = format!("{head}\n{tls}\n[[replica]]{replicas}");
            SpokeConfig::parse(&text, Path::new("/etc/meridian"), None).map(|config| config.tls)
        };
        let files = "[tls]\ncertificate = \"door.crt\"\nkey = \"door.key\"\nclient_ca = \"/ca.crt\"\n";
        assert_eq!(with("127.0.0.1:7100", ""), Ok(None));
        assert_eq!(with("10.0.0.7:7100", "[tls]\ninsecure = true\n"), Ok(None));
        let read = with("10.0.0.7:7100", files).unwrap().unwrap();
        let [certificate, key, client_ca] =
            ["/etc/meridian/door.crt", "/etc/meridian/door.key", "/ca.crt"].map(PathBuf::from);
        assert_eq!(read, TlsFiles { certificate, key, client_ca });
        let problems = with("10.0.0.7:7100", "").unwrap_err();
        assert!(problems.len() == 2 && problems[0].contains("insecure = true"), "{problems:#?}");
        for half in
            [format!("{files}insecure = true\n"), "[tls]\nkey = \"door.key\"\n".into(), "[tls]\n".into()]
        {
            let problems = with("127.0.0.1:7100", &half).unwrap_err();
            assert!(problems.len() == 1 && problems[0].contains("[tls] needs"), "{half}: {problems:#?}");
        }
    }

    #[test]
    fn as_many_replicas_as_there_may_be_are_taken_and_one_more_is_not() {
        let text = |replicas: usize| {
            let head = EXAMPLE.split("[[replica]]").next().unwrap().to_owned();
            (1..=replicas).fold(head, |text, n| format!("{text}\n[[replica]]\nendpoint = \"10.0.0.8:{n}\"\n"))
        };
        assert_eq!(parse(&text(REPLICAS_MAX), None).unwrap().replicas.len(), REPLICAS_MAX);
        assert!(parse(&text(REPLICAS_MAX + 1), None).unwrap_err().contains("too many"));
    }
}
