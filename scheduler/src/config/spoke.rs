//! Reader of `spoke.toml`.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use configuration::{ConfigFile, Environment, Files, Problem, section};
use identity::{IdentitySection, OwnName, Transport};
use regions::accelerator::{COUNT_MAX, PRICE_MAX, TYPES_MAX, to_millionths};
use regions::region_list::find_region;
use regions::spiffe::Role;
use regions::{
    AcceleratorType, Accelerators, Catalogue, EngineKind, HostPort, InstanceName, IpNetwork, Offering,
    RegionId,
};
use resolver::DnsSection;
use scheduler_api::peer::SPOKE_REPLICAS_MAX;
use scheduler_api::registration::JobLogKind;
use scheduler_client::hub::check_transport;
use scheduler_core::hubs::Hubs;
use scheduler_core::jobs::JobsSection;
use scheduler_core::policy_age::{POLICY_MAX_AGE, POLICY_MAX_AGE_MAX, POLICY_MAX_AGE_MIN};
use scheduler_core::receipts::ReceiptsSection;
use scheduler_core::spoke::Spoke;
use telemetry::{LogsConfig, LogsSection, MetricsConfig, MetricsSection, TracingConfig, TracingSection};

use super::scaling::{ActuatorConfig, ScalingConfig, ScalingSection};

section! {
    /// Spoke: an ingress and agent of one region, and its scaler.
    partial struct SpokeFile {
        /// Id of the region in the catalogue; may be given as `--region` instead.
        region: Option<String>;
        /// Name of this spoke among those of its region; by default the host name and the port of `listen`. The
        /// spokes of a region serve the same replicas: each lists all of them.
        instance: Option<InstanceName>;
        /// Listener for gateways and the other spokes of the region.
        listen: SocketAddr, like "\"IP:PORT\"";
        /// Address for gateways, with a name or an IP address: that of the listener, or of a load balancer in front.
        advertise: HostPort, like "\"HOST:PORT\"";
        /// Hubs that publish the route table.
        hub: Hubs, like "\"http://HOST:PORT\", or a list of such";
        /// Maximum age of the route table for requests of deployments with a residency policy, while no hub responds.
        policy_max_age: Duration = POLICY_MAX_AGE, in POLICY_MAX_AGE_MIN..=POLICY_MAX_AGE_MAX;
        /// Catalogue of clouds and regions; the built-in one if absent.
        catalogue: Option<PathBuf>;
        /// Receipts of the requests that arrive here; none are written without this table.
        receipts: Option<ReceiptsSection>;
        /// Queue of durable jobs; without this table this spoke accepts none. Of several spokes of a region one has it, or all
        /// have it with the same NATS servers.
        jobs: Option<JobsSection>;
        /// Listener for operators, plaintext; that of the ingress, without `/log`, if absent.
        operations: Option<SocketAddr>;
        /// Load balancers in front of `listen`, each of whose connections begins with a PROXY protocol header, version 2. If
        /// there are any, no other peer may connect.
        proxy_protocol_from: Vec<IpNetwork> = Vec::new();
        /// Resolution of the names of hubs and replicas.
        dns: DnsSection;
        /// Traces by OTLP.
        tracing: TracingSection;
        /// Events of the log by OTLP.
        logs: LogsSection;
        /// Metrics by OTLP, beside `/metrics`.
        metrics: MetricsSection;
        /// Identity towards gateways, hubs and replicas; without this table the listener must be on loopback.
        identity: Option<IdentitySection>;
        /// Actuator; without this table this spoke starts no replicas. Of several spokes with it, one starts replicas for all.
        scaling: Option<ScalingSection>;
        /// Accelerators of the region, in place of those of the catalogue, for deployments with a placement. Of several spokes of
        /// a region all have the same.
        accelerators: Vec<AcceleratorsEntry> = Vec::new(), in 0..=TYPES_MAX;
        /// Replicas that are started independently, one table each.
        replica: Vec<ReplicaEntry> = Vec::new(), in 0..=SPOKE_REPLICAS_MAX;
    }
}

section! {
    /// Replica that is started independently.
    partial struct ReplicaEntry {
        /// Address of its listener.
        endpoint: HostPort, like "\"127.0.0.1:7200\"";
    }
}

section! {
    /// Accelerators of one type in the region.
    partial struct AcceleratorsEntry {
        /// Type, under the name that deployments use.
        accelerator ("type"): AcceleratorType, like "\"l4\"";
        /// Price of one per hour, in the unit of the catalogue; unknown if absent.
        price: Option<f64>, in 0.0..=PRICE_MAX, fix "the price of one per hour, as price = 0.71";
        /// Number that the fleet may use, such as a quota; unknown if absent.
        count: Option<u32>, in 1..=COUNT_MAX, fix "or remove it if it is unknown";
    }
}

/// File in which the kernel names the host.
const HOST_NAME: &str = "/proc/sys/kernel/hostname";
/// Maximum length of the host name in a default instance name: that and a port are shorter than the longest name.
const HOST_CHARS_MAX: usize = 58;

/// Configuration of a spoke: ingress, agent and scaler.
#[derive(Clone, Debug)]
pub struct SpokeConfig {
    /// Region of the spoke.
    pub region: RegionId,
    /// Name of the spoke within its region.
    pub instance: InstanceName,
    /// Listen address of the ingress.
    pub listen: SocketAddr,
    /// Address at which gateways reach the ingress.
    pub advertise: HostPort,
    /// The hubs.
    pub hub: Hubs,
    /// Requests of locked deployments are rejected if no hub has confirmed the route table for longer.
    pub policy_max_age: Duration,
    /// Addresses of the replicas in the file.
    pub replicas: Vec<HostPort>,
    /// Clouds and regions.
    pub catalogue: Arc<Catalogue>,
    /// Listen address for operators; by default that of the ingress.
    pub operations: Option<SocketAddr>,
    /// Load balancers whose connections begin with a PROXY protocol header.
    pub proxy_protocol_from: Vec<IpNetwork>,
    /// Resolution of names.
    pub dns: DnsSection,
    /// Transport security of connections with gateways, hubs and replicas.
    pub transport: Transport,
    /// Autoscaling of further replicas, if configured.
    pub scaling: Option<ScalingConfig>,
    /// Traces, if they are configured.
    pub tracing: Option<TracingConfig>,
    /// Accelerators of the region; empty if those of the catalogue apply.
    pub accelerators: Accelerators,
    /// Log of the queue of jobs, if this spoke has one.
    pub job_log: Option<JobLogKind>,
    /// Export of the log, if it is configured.
    pub logs: Option<LogsConfig>,
    /// Export of the metrics, if it is configured.
    pub metrics: Option<MetricsConfig>,
    /// Engines that its replicas can run, if that is known.
    pub engines: Option<BTreeSet<EngineKind>>,
}

/// Content of `spoke.toml`, of which the ingress validates a part.
pub struct ReadSpoke {
    /// Configuration; `None` after a problem.
    pub config: Option<SpokeConfig>,
    /// Storage of receipts, for the ingress.
    pub receipts: Option<ReceiptsSection>,
    /// Queue of jobs, for the ingress.
    pub jobs: Option<JobsSection>,
}

impl SpokeConfig {
    /// Parses the configuration `text`; relative paths are resolved against `base`, and `region` is that of the command
    /// line, which the file may omit.
    ///
    /// # Errors
    ///
    /// All problems, each with the key, the value and the fix.
    pub fn parse(text: &str, base: &Path, region: Option<&str>) -> Result<SpokeConfig, Vec<Problem>> {
        let environment = Environment::of_process();
        let files = Files { base, environment: Some(&environment) };
        ConfigFile::read(text, |document| SpokeConfig::read(document, &files, region)?.config)
    }

    /// Returns the reference of the keys.
    pub fn reference() -> String {
        configuration::reference::<SpokeFile>("spoke.toml")
    }

    /// Reads the configuration.
    pub fn read(document: &ConfigFile<'_>, files: &Files<'_>, region: Option<&str>) -> Option<ReadSpoke> {
        let file: SpokeFile = document.section()?;
        let catalogue_file = file.catalogue.clone().flatten().map(|path| files.path(path));
        let catalogue = file.catalogue.and_then(|path| match path {
            None => Some(Catalogue::builtin()),
            Some(path) => files.parsed(document, "catalogue", &path, Catalogue::parse),
        });
        let catalogue = catalogue.map(Arc::new);
        let region = file.region.and_then(|written| one_region(document, written, region));
        let region = region.zip(catalogue.as_ref()).and_then(|(region, catalogue)| {
            find_region(&region, catalogue).map_err(|problem| document.problem("region", problem)).ok()
        });
        let name = region.as_ref().map(|region| OwnName::of(&[Role::Spoke], region));
        let transport = file
            .identity
            .and_then(|section| Transport::read(section, document, files, name, catalogue.as_ref()));
        if let Some(transport) = &transport {
            for (name, address) in
                [("listen", file.listen.map(HostPort::from)), ("advertise", file.advertise.clone())]
            {
                if let Some(address) = address {
                    transport.check_listener(document, name, &address);
                }
            }
        }
        if let (Some(hub), Some(transport)) = (&file.hub, &transport)
            && let Err(problem) = check_transport(hub, transport)
        {
            document.problem("hub", problem);
        }
        let replicas = file.replica.and_then(|entries| replicas(document, entries, transport.as_ref()));
        let fixed = replicas.as_ref().map_or(0, Vec::len);
        let scaling = file.scaling.and_then(|section| match section {
            None => Some(None),
            Some(section) => section.validate(document, files, fixed, catalogue_file).map(Some),
        });
        if let (Some(Some(scaling)), Some(transport)) = (&scaling, &transport) {
            scaling.check_transport(document, transport);
        }
        let accelerators = file.accelerators.and_then(|entries| accelerators(document, entries));
        let tracing = file.tracing.and_then(|section| section.read(document, files));
        let job_log = file.jobs.as_ref().and_then(Option::as_ref).map(|jobs| match jobs.nats.as_slice() {
            [] => JobLogKind::File,
            _ => JobLogKind::Nats,
        });
        let logs = file.logs.and_then(|section| section.read(document, files));
        let metrics = file.metrics.and_then(|section| section.read(document, files));
        let config = || {
            Some(SpokeConfig {
                region: region?,
                instance: file.instance?.unwrap_or_else(|| default_instance(file.listen.as_ref())),
                listen: file.listen?,
                advertise: file.advertise?,
                hub: file.hub?,
                policy_max_age: file.policy_max_age?,
                replicas: replicas?,
                catalogue: catalogue?,
                operations: file.operations?,
                proxy_protocol_from: file.proxy_protocol_from?,
                dns: file.dns?,
                transport: transport?,
                scaling: scaling?,
                tracing: tracing?,
                accelerators: accelerators?,
                job_log,
                logs: logs?,
                metrics: metrics?,
                engines: None,
            })
        };
        Some(ReadSpoke { config: config(), receipts: file.receipts.flatten(), jobs: file.jobs.flatten() })
    }

    /// Returns whether all replicas of this spoke are processes of its own program, so that it knows their engines.
    pub fn runs_own_program(&self) -> bool {
        let is_own = |scaling: &ScalingConfig| match &scaling.actuator {
            ActuatorConfig::Process(process) => process.program.is_none(),
            ActuatorConfig::Kubernetes(_) => false,
        };
        self.replicas.is_empty() && self.scaling.as_ref().is_some_and(is_own)
    }

    /// Returns the region's state before any replica has reported. `boot_id` is random at every start of a spoke.
    pub fn spoke(&self, boot_id: u64) -> Spoke {
        let spoke = Spoke::new(self.region.clone(), boot_id, self.replicas.clone());
        let mut spoke = spoke.with_instance(self.instance.clone());
        spoke.limit_policy_age(self.policy_max_age, Instant::now());
        spoke
    }
}

/// Returns the host name and the port, which differ between the spokes of a region without any configuration.
fn default_instance(listen: Option<&SocketAddr>) -> InstanceName {
    let allowed = |letter: &char| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '_' | '.');
    let host = std::fs::read_to_string(HOST_NAME).unwrap_or_default();
    let host: String = host.chars().filter(allowed).take(HOST_CHARS_MAX).collect();
    let port = listen.map_or(0, SocketAddr::port);
    format!("{host}-{port}").parse().expect("a cut host name of allowed letters, with a port")
}

fn one_region(document: &ConfigFile<'_>, written: Option<String>, typed: Option<&str>) -> Option<String> {
    if let (Some(written), Some(typed)) = (&written, typed)
        && written != typed
    {
        let fix = "set one of them, or both to the same region";
        document.problem("region", format!("\"{written}\" but --region {typed}; {fix}"));
        return None;
    }
    let region = written.or_else(|| typed.map(str::to_owned));
    if region.is_none() {
        let example = "region = \"CLOUD/NAME\", such as \"gcp/europe-west4\", or pass --region";
        document.problem("region", format!("is missing; write {example}"));
    }
    region
}

/// Returns the accelerators of the region, each type once.
fn accelerators(document: &ConfigFile<'_>, entries: Vec<AcceleratorsEntry>) -> Option<Accelerators> {
    let mut accelerators = Accelerators::new();
    for (index, AcceleratorsEntry { accelerator, price, count }) in entries.into_iter().enumerate() {
        let (accelerator, offering) =
            (accelerator?, Offering { count: count?, price: price?.map(to_millionths) });
        if accelerators.insert(accelerator.clone(), offering).is_some() {
            let message = format!("`{accelerator}` is listed twice; keep one");
            document.problem(&format!("accelerators[{index}].type"), message);
        }
    }
    Some(accelerators)
}

fn replicas(
    document: &ConfigFile<'_>,
    entries: Vec<ReplicaEntry>,
    transport: Option<&Transport>,
) -> Option<Vec<HostPort>> {
    let mut known = BTreeSet::new();
    for (index, ReplicaEntry { endpoint }) in entries.iter().enumerate() {
        if let (Some(address), Some(Transport::Loopback)) = (endpoint, transport)
            && !address.is_loopback()
        {
            let problem = format!(
                "\"{address}\" is not a loopback address, and without [identity] requests are sent to this machine only; add \
                 [identity] with dir, or with insecure = true"
            );
            document.problem(&format!("replica[{index}].endpoint"), problem);
        }
    }
    for (index, ReplicaEntry { endpoint }) in entries.iter().enumerate() {
        if let Some(address) = endpoint.as_ref().filter(|&address| !known.insert(address.clone())) {
            let problem = format!("\"{address}\" is the endpoint of another replica; remove one of them");
            document.problem(&format!("replica[{index}].endpoint"), problem);
        }
    }
    entries.into_iter().map(|entry| entry.endpoint).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = include_str!("../../../configs/spoke.toml");

    fn all(text: &str, base: &Path, region: Option<&str>) -> Result<SpokeConfig, Vec<String>> {
        let parsed = SpokeConfig::parse(text, base, region);
        parsed.map_err(|found| found.iter().map(ToString::to_string).collect())
    }

    fn parse(text: &str, region: Option<&str>) -> Result<SpokeConfig, String> {
        all(text, Path::new("."), region).map_err(|problems| problems.join("\n"))
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
        assert!(parse(&without, None).unwrap_err().contains("region: is missing"));
        let problems = parse(EXAMPLE, Some("aws/us-east-1")).unwrap_err();
        assert!(problems.contains("gcp/europe-west4") && problems.contains("aws/us-east-1"), "{problems}");
    }

    #[test]
    fn five_mistakes_in_five_sections_are_five_problems_with_their_lines() {
        let text = "region = \"aws/us-esat-1\"\nlisten = \"127.0.0.1:1\"\nadvertise = \"127.0.0.1:1\"\nhub = \"http://hub\"\n\
                    [receipts]\ndirr = \"r\"\ndir = \"r\"\n[identity]\nkey = \"k\"\n[scaling]\nactuator = \"process\"\ndir = \"d\"\n\
                    ports = \"7300-7399\"\norphan_timeout = \"2h\"\n[[replica]]\nendpoint = \"0.0.0.0:1\"\n";
        let problems = all(text, Path::new("."), None).unwrap_err();
        let expected = [
            "line 1: region: no region `aws/us-esat-1` in the catalogue; did you mean aws/us-east-1",
            "line 6: receipts.dirr: unknown key `dirr`; did you mean dir?; the keys are dir, key_file",
            "line 8: identity: needs dir, or certificate, key and authorities",
            "line 14: scaling.orphan_timeout: \"2h\" is out of range; write a duration from \"1s\" to \"1h\"",
            "line 16: replica 1: endpoint: \"0.0.0.0:1\" is unreachable for other processes; write HOST:PORT",
        ];
        assert_eq!(problems.len(), expected.len(), "{problems:#?}");
        for (problem, part) in problems.iter().zip(expected) {
            assert!(problem.starts_with(part), "{part} in {problem}");
        }
    }

    #[test]
    fn a_maximum_age_is_accepted_at_its_limits_and_rejected_past_them() {
        let hours = |hours: u64| Ok(Duration::from_secs(hours * 3600));
        let read = |line: &str| {
            parse(&EXAMPLE.replace("policy_max_age = \"7d\"", line), None).map(|config| config.policy_max_age)
        };
        let written = |text: &str| read(&format!("policy_max_age = \"{text}\""));
        assert_eq!((read(""), written("7d"), written("36h")), (hours(168), hours(168), hours(36)));
        assert_eq!((written("365d"), written("1m")), (hours(8760), Ok(Duration::from_secs(60))));
        for text in ["", "d", "59s", "366d", "8761h", "7", "1.5d", "-1d", "99999999999d"] {
            let problem = written(text).expect_err(text);
            assert!(problem.contains("policy_max_age") && problem.contains("365d"), "{problem}");
        }
    }

    #[test]
    fn all_problems_are_reported_together() {
        let check = |text: &str, expected: &[&str]| {
            let problems = all(text, Path::new("."), None).expect_err(text);
            assert_eq!(problems.len(), expected.len(), "{problems:#?}");
            for (problem, part) in problems.iter().zip(expected) {
                assert!(problem.contains(part), "{part} in {problem}");
            }
        };
        check("", &["advertise: is missing", "hub: is missing", "listen: is missing", "region: is missing"]);
        check(
            "region = \"aws/us-esat-1\"\nlisten = \"here\"\nadvertise = \"0.0.0.0:7100\"\nhub = \"hub:7000\"\n\
             catalogue = \"/nowhere.toml\"\n",
            &["here", "0.0.0.0:7100", "hub:7000", "/nowhere.toml"],
        );
        check(
            "region = \"aws/us-esat-1\"\nlisten = \"0.0.0.0:7100\"\nadvertise = \"10.0.0.7:7100\"\n\
             hub = \"https://hub\"\n[[replica]]\nendpoint = \"10.0.0.8:0\"\n[[replica]]\nendpoint = \"10.0.0.8:9\"\n\
             [[replica]]\nendpoint = \"10.0.0.8:9\"\n",
            &[
                "did you mean aws/us-east-1",
                "listen: \"0.0.0.0:7100\" is not a loopback address",
                "advertise: \"10.0.0.7:7100\" is not a loopback address",
                "https://hub",
                "replica 1: endpoint: \"10.0.0.8:0\" has the port 0",
                "replica 2: endpoint: \"10.0.0.8:9\" is not a loopback address",
                "replica 3: endpoint: \"10.0.0.8:9\" is not a loopback address",
                "replica 3: endpoint: \"10.0.0.8:9\" is the endpoint of another replica",
            ],
        );
    }

    #[test]
    fn commented_keys_of_the_example_are_known_keys() {
        let scaling = [
            "[scaling]",
            "actuator =",
            "dir =",
            "ports =",
            "address =",
            "program =",
            "orphan_timeout =",
            "devices =",
        ];
        let keys = ["operations ="].into_iter().chain(scaling);
        let text = keys.fold(
            EXAMPLE.replace("# dir = \"identity\"", "").replace("# dir = \"jobs\"", ""),
            |text, key| text.replace(&format!("\n# {key}"), &format!("\n{key}")),
        );
        let config = parse(&text, None).unwrap();
        assert!(config.scaling.is_some());
        assert_eq!(config.operations.map(|address| address.port()), Some(7101));
    }

    #[test]
    fn accelerators_are_read_and_each_type_is_listed_once() {
        let keys = ["[[accelerators]]", "type =", "price = 0.62", "count ="];
        let text = keys
            .iter()
            .fold(EXAMPLE.to_owned(), |text, key| text.replace(&format!("\n# {key}"), &format!("\n{key}")));
        let config = parse(&text, None).unwrap();
        let offering = Offering { count: Some(16), price: Some(620_000) };
        assert_eq!(config.accelerators, Accelerators::from([("l4".parse().unwrap(), offering)]));
        assert!(parse(EXAMPLE, None).unwrap().accelerators.is_empty());
        let twice = format!("{EXAMPLE}{}", "[[accelerators]]\ntype = \"t4\"\n".repeat(2));
        assert!(parse(&twice, None).unwrap_err().contains("`t4` is listed twice; keep one"));
    }

    #[test]
    fn plaintext_on_a_reachable_address_needs_an_explicit_setting() {
        let with = |address: &str, identity: &str| {
            let text = EXAMPLE.replace("127.0.0.1:7100", address);
            let (head, replicas) = text.split_once("[[replica]]").unwrap();
            let text = format!("{head}\n{identity}\n[[replica]]{replicas}");
            all(&text, Path::new("/etc/meridian"), None).map(|config| config.transport)
        };
        assert!(matches!(with("127.0.0.1:7100", ""), Ok(Transport::Loopback)));
        assert!(matches!(with("10.0.0.7:7100", "[identity]\ninsecure = true\n"), Ok(Transport::Plaintext)));
        let problems = with("10.0.0.7:7100", "").unwrap_err();
        assert!(problems.len() == 2 && problems[0].contains("insecure = true"), "{problems:#?}");
        let files = "[identity]\ncertificate = \"no.crt\"\nkey = \"no.key\"\nauthorities = \"no.ca\"\n";
        let problems = with("127.0.0.1:7100", files).unwrap_err();
        let keys = ["identity.certificate", "identity.key", "identity.authorities"];
        assert!(problems.len() == 3 && keys.iter().all(|key| problems.iter().any(|it| it.contains(key))));
        for half in
            ["insecure = true\ndir = \"d\"", "key = \"spoke.key\"", "", "dir = \"d\"\nrevoked = \"r\""]
        {
            let problems = with("127.0.0.1:7100", &format!("[identity]\n{half}")).unwrap_err();
            assert!(problems.len() == 1 && problems[0].contains("identity: needs"), "{half}: {problems:#?}");
        }
    }

    #[test]
    fn limit_of_replicas_is_enforced() {
        let text = |replicas: usize| {
            let head = EXAMPLE.split("[[replica]]").next().unwrap().to_owned();
            (1..=replicas)
                .fold(head, |text, n| format!("{text}\n[[replica]]\nendpoint = \"127.0.0.1:{n}\"\n"))
        };
        assert_eq!(parse(&text(SPOKE_REPLICAS_MAX), None).unwrap().replicas.len(), SPOKE_REPLICAS_MAX);
        assert!(
            parse(&text(SPOKE_REPLICAS_MAX + 1), None)
                .unwrap_err()
                .contains("replica: has 257 entries; write at most 256")
        );
    }
}
