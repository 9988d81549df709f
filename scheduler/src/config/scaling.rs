//! `[scaling]` of `spoke.toml`: the actuator, which starts and stops the region's replicas.

use std::net::{IpAddr, Ipv4Addr};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use configuration::{ConfigField, ConfigFile, ConfigValue, Files, NoLimit, Rule, section, words};
use identity::Transport;
use scheduler_api::peer::SPOKE_REPLICAS_MAX;
use scheduler_core::scale::devices::Device;

use super::kubernetes::{self, KubernetesConfig, WorkloadKind, is_api, is_label, is_pattern};

/// Default of `scaling.orphan_timeout`.
const ORPHAN_TIMEOUT_DEFAULT: Duration = Duration::from_secs(60);
/// Range of `scaling.orphan_timeout`: long enough for a restart of the spoke, short enough not to leave replicas
/// behind.
const ORPHAN_TIMEOUT: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(3600);
/// Keys of a replica's configuration that the spoke writes.
const RESERVED_KEYS: [&str; 6] = ["listen", "names", "model", "task", "engine", "catalogue"];
/// Table of a replica's configuration with its identity.
const IDENTITY: &str = "identity";
/// Identity folder of the replicas, below the folder of the section.
const IDENTITY_FOLDER: &str = "identity";
/// Keys of each actuator.
const OF_PROCESSES: [&str; 6] = ["address", "ports", "program", "template", "orphan_timeout", "devices"];
const OF_KUBERNETES: [&str; 7] = ["namespace", "workload", "name", "port", "api", "token_file", "ca_file"];

words! {
    /// Kind of actuator.
    pub(super) enum ActuatorKind {
        /// Processes on the spoke's machine.
        Process = "process",
        /// Pods of a Kubernetes cluster.
        Kubernetes = "kubernetes",
    }
}

section! {
    /// Actuator, which starts and stops replicas according to `scaling` of each deployment.
    pub(super) partial struct ScalingSection {
        /// Processes on this machine, or pods of one workload per deployment.
        pub(super) actuator: ActuatorKind, like "\"process\" or \"kubernetes\"";
        /// Directory of the state that survives a restart.
        pub(super) dir: PathBuf, like "\"replicas\"";
        /// `process`: listen address of the replicas.
        pub(super) address: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST), check is_own_address;
        /// `process`: port range such as `7300-7399`, which also limits the number of replicas; required.
        pub(super) ports: Option<String>;
        /// `process`: program of the replicas; the spoke's own if absent.
        pub(super) program: Option<PathBuf>;
        /// `process`: file with further keys for each replica's configuration.
        pub(super) template: Option<PathBuf>;
        /// `process`: time for which replicas continue without a spoke.
        pub(super) orphan_timeout: Duration = ORPHAN_TIMEOUT_DEFAULT, in ORPHAN_TIMEOUT;
        /// `process`: GPUs, one for each replica, which limit the number of replicas; replicas share all devices if absent.
        /// Indexes or unique names as in `CUDA_VISIBLE_DEVICES`, or `"all"` for those of the machine.
        pub(super) devices: Option<DevicesEntry>;
        /// `kubernetes`: namespace of the workloads; required.
        pub(super) namespace: Option<String>, check is_label;
        /// `kubernetes`: kind of the workloads.
        pub(super) workload: WorkloadKind = WorkloadKind::Deployment;
        /// `kubernetes`: name of the workload, in lower-case letters, digits and `-`.
        pub(super) name: String = format!("replica-{}", kubernetes::DEPLOYMENT), check is_pattern;
        /// `kubernetes`: listen port of a replica in its pod.
        pub(super) port: u16 = kubernetes::PORT;
        /// `kubernetes`: URL of the API server.
        pub(super) api: String = kubernetes::API.to_owned(), check is_api;
        /// `kubernetes`: file with the bearer token; that of the service account if absent and `api` is https.
        pub(super) token_file: Option<PathBuf>;
        /// `kubernetes`: certificate of the API server's authority; that of the service account if absent.
        pub(super) ca_file: Option<PathBuf>;
    }
}

/// Devices of the replicas: all of the machine, or a list.
pub(super) enum DevicesEntry {
    All,
    Listed(Vec<String>),
}

impl ConfigValue for DevicesEntry {
    type Limit = NoLimit;
    type Item = String;

    fn type_name() -> String {
        format!("\"all\", or {}", Vec::<String>::type_name())
    }

    fn read(field: &ConfigField<'_>, _: &Rule<DevicesEntry>) -> Option<DevicesEntry> {
        match field.value.get_ref().as_str() {
            Some("all") => Some(DevicesEntry::All),
            Some(_) => {
                field.wrong_type("\"all\", or a list such as [\"0\", \"1\"]");
                None
            }
            None => {
                let fix = "or remove it to let replicas share all devices";
                let rule = Rule { limit: (1..=SPOKE_REPLICAS_MAX).into(), fix, ..Rule::default() };
                Vec::read(field, &rule).map(DevicesEntry::Listed)
            }
        }
    }
}

fn is_own_address(address: &IpAddr) -> Result<(), String> {
    if address.is_unspecified() || address.is_multicast() {
        return Err(
            "is not an address of this machine; write one such as \"127.0.0.1\", without a port".to_owned()
        );
    }
    Ok(())
}

/// Configuration of the region's autoscaling.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScalingConfig {
    /// Folder of the state that survives a restart: the route table and the running replicas.
    pub dir: PathBuf,
    /// The actuator.
    pub actuator: ActuatorConfig,
}

/// Actuator, which starts and stops replicas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ActuatorConfig {
    /// The spoke itself, which runs replicas as processes on its machine.
    Process(ProcessConfig),
    /// A Kubernetes cluster, which runs replicas as pods of its workloads.
    Kubernetes(KubernetesConfig),
}

/// Replicas as processes on the spoke's machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessConfig {
    /// IP address on which replicas listen.
    pub address: IpAddr,
    /// Ports on which replicas listen; their number limits the number of replicas.
    pub ports: RangeInclusive<u16>,
    /// Program started as `PROGRAM replica --config FILE`; by default the spoke's own executable.
    pub program: Option<PathBuf>,
    /// Content of each replica's configuration besides the keys that the spoke writes.
    pub template: String,
    /// Whether that content has the identity of the replicas.
    pub has_identity: bool,
    /// File of the catalogue, if it is not the built-in one.
    pub catalogue: Option<PathBuf>,
    /// Time for which a replica continues without a running spoke.
    pub orphan_timeout: Duration,
    /// Devices of the replicas.
    pub devices: DeviceSelection,
}

/// Devices of the replicas of one machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceSelection {
    /// Each replica can use all devices of the machine.
    Shared,
    /// Each replica has one of the machine's devices, which are found when the spoke starts.
    All,
    /// Each replica has one of these.
    Listed(Vec<Device>),
}

impl ProcessConfig {
    /// Returns the folder of the identity that the spoke obtains for its replicas, with the section's folder `dir`; `None` if
    /// they use plaintext, or have another identity.
    pub fn replica_identity(&self, dir: &Path, transport: &Transport) -> Option<PathBuf> {
        let is_needed = transport.identity().is_some() && !self.has_identity;
        is_needed.then(|| dir.join(IDENTITY_FOLDER))
    }

    /// Returns the configuration with these ports and defaults.
    #[cfg(test)]
    pub(crate) fn with_defaults(ports: RangeInclusive<u16>) -> ProcessConfig {
        ProcessConfig {
            address: [127, 0, 0, 1].into(),
            ports,
            program: None,
            template: String::new(),
            has_identity: false,
            catalogue: None,
            orphan_timeout: ORPHAN_TIMEOUT_DEFAULT,
            devices: DeviceSelection::Shared,
        }
    }
}

impl ScalingConfig {
    /// Returns the folder of the identity that the spoke obtains for the replicas that it starts, if it does.
    pub fn replica_identity(&self, transport: &Transport) -> Option<PathBuf> {
        match &self.actuator {
            ActuatorConfig::Process(process) => process.replica_identity(&self.dir, transport),
            ActuatorConfig::Kubernetes(_) => None,
        }
    }

    /// Records a problem if the spoke could not connect to the replicas that it starts.
    pub(super) fn check_transport(&self, document: &ConfigFile<'_>, transport: &Transport) {
        match &self.actuator {
            ActuatorConfig::Process(ProcessConfig { has_identity: true, .. })
                if transport.identity().is_none() =>
            {
                let problem =
                    "has [identity], which the spoke lacks; add [identity] to this file, or remove it there";
                document.problem("scaling.template", problem);
            }
            ActuatorConfig::Process(ProcessConfig { address, .. }) if !transport.permits(*address) => {
                let problem = format!(
                    "\"{address}\" is not a loopback address, and without [identity] requests are sent to this machine only; \
                     add [identity] with dir, or with insecure = true"
                );
                document.problem("scaling.address", problem);
            }
            ActuatorConfig::Process(_) => {}
            ActuatorConfig::Kubernetes(_) if matches!(transport, Transport::Loopback) => {
                let problem = "\"kubernetes\" needs [identity], since pods have addresses of their own; add it with dir, or \
                               with insecure = true";
                document.problem("scaling.actuator", problem);
            }
            ActuatorConfig::Kubernetes(_) => {}
        }
    }
}

impl ScalingSection {
    /// Validates the section; `fixed` is the number of replicas of the file, and `catalogue` the path of the spoke's.
    pub(super) fn validate(
        self,
        document: &ConfigFile<'_>,
        files: &Files<'_>,
        fixed: usize,
        catalogue: Option<PathBuf>,
    ) -> Option<ScalingConfig> {
        let (dir, kind) = (self.dir.clone(), self.actuator?);
        let others = if kind == ActuatorKind::Process { &OF_KUBERNETES[..] } else { &OF_PROCESSES };
        document.without_effect("scaling", others, &format!("with actuator \"{kind}\""));
        let actuator = match kind {
            ActuatorKind::Process => {
                let ports = ports(document, self.ports?, fixed);
                let (template, has_identity) = template(document, files, self.template?).unzip();
                let devices = self.devices.and_then(|devices| DeviceSelection::validate(document, devices));
                if let (Some(ports), Some(DeviceSelection::Listed(devices))) = (&ports, &devices)
                    && ports.len() < devices.len()
                {
                    let (ports, devices) = (ports.len(), devices.len());
                    let problem =
                        format!("has {ports} ports for {devices} devices; widen it, or remove devices");
                    document.problem("scaling.ports", problem);
                }
                ActuatorConfig::Process(ProcessConfig {
                    address: self.address?,
                    ports: ports?,
                    program: self.program?.map(|program| files.path(program)),
                    template: template?,
                    has_identity: has_identity?,
                    catalogue,
                    orphan_timeout: self.orphan_timeout?,
                    devices: devices?,
                })
            }
            ActuatorKind::Kubernetes => ActuatorConfig::Kubernetes(self.kubernetes(document, files)?),
        };
        Some(ScalingConfig { dir: files.path(dir?), actuator })
    }

    /// Validates the keys of the actuator `kubernetes`.
    pub(super) fn kubernetes(self, document: &ConfigFile<'_>, files: &Files<'_>) -> Option<KubernetesConfig> {
        let namespace = self.namespace?;
        if namespace.is_none() {
            document.problem("scaling.namespace", "is missing; write namespace = \"meridian\"");
        }
        let api = kubernetes::api(&self.api?)?;
        // No token is sent without TLS.
        let account = |file: &str| (api.scheme() == "https").then(|| kubernetes::account(file));
        let given = |file: Option<PathBuf>| file.map(|file| files.path(file));
        Some(KubernetesConfig {
            namespace: namespace?,
            kind: self.workload?,
            name: self.name?,
            port: self.port?,
            token_file: given(self.token_file?).or_else(|| account("token")),
            ca_file: given(self.ca_file?).or_else(|| account("ca.crt")),
            api,
        })
    }
}

impl DeviceSelection {
    /// Validates the key `devices`: the names of distinct devices.
    fn validate(document: &ConfigFile<'_>, given: Option<DevicesEntry>) -> Option<DeviceSelection> {
        let names = match given {
            None => return Some(DeviceSelection::Shared),
            Some(DevicesEntry::All) => return Some(DeviceSelection::All),
            Some(DevicesEntry::Listed(names)) => names,
        };
        let device = |(index, name): (usize, &String)| {
            let problem = |problem: String| document.problem(&format!("scaling.devices[{index}]"), problem);
            if names[..index].contains(name) {
                problem(format!("{name:?} is listed twice; a device has one replica"));
                return None;
            }
            name.parse().map_err(problem).ok()
        };
        let devices: Vec<Option<Device>> = names.iter().enumerate().map(device).collect();
        devices.into_iter().collect::<Option<_>>().map(DeviceSelection::Listed)
    }
}

fn ports(document: &ConfigFile<'_>, given: Option<String>, fixed: usize) -> Option<RangeInclusive<u16>> {
    let problem = |problem: String| document.problem("scaling.ports", problem);
    let Some(text) = given else {
        problem("is missing; write ports = \"7300-7399\"".to_owned());
        return None;
    };
    let range = text.split_once('-').and_then(|(from, to)| Some(from.parse().ok()?..=to.parse().ok()?));
    let Some(range) = range.filter(|range| *range.start() > 0 && !range.is_empty()) else {
        let fix = "write the first and the last, such as \"7300-7399\"";
        problem(format!("\"{text}\" is not a range of ports; {fix}"));
        return None;
    };
    if range.len() + fixed > SPOKE_REPLICAS_MAX {
        problem(format!(
            "\"{text}\" has {} ports and there are {fixed} [[replica]]; a spoke has at most {SPOKE_REPLICAS_MAX} replicas",
            range.len()
        ));
        return None;
    }
    Some(range)
}

/// Returns the content of the template, and whether it has an identity.
fn template(document: &ConfigFile<'_>, files: &Files<'_>, given: Option<PathBuf>) -> Option<(String, bool)> {
    let Some(path) = given else {
        return Some((String::new(), false));
    };
    let parse = |text: &str| {
        let template = ConfigFile::parse(text)?;
        let ours = RESERVED_KEYS.into_iter().filter(|key| template.has(key));
        Ok((text.to_owned(), template.has(IDENTITY), ours.collect::<Vec<_>>()))
    };
    let (text, has_identity, ours) = files.parsed(document, "scaling.template", &path, parse)?;
    if ours.is_empty() {
        return Some((text, has_identity));
    }
    let (path, ours) = (path.display(), ours.join(", "));
    let problem = format!("\"{path}\" has {ours}, which the spoke writes for each replica; remove it");
    document.problem("scaling.template", problem);
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn read(text: &str, fixed: usize) -> Result<ScalingConfig, Vec<String>> {
        section! {
            /// File with the section.
            struct File {
                /// Section.
                scaling: ScalingSection;
            }
        }
        let files = Files { base: Path::new("/etc/meridian"), environment: None };
        let read = ConfigFile::read(&format!("[scaling]\n{text}"), |document| {
            document.section::<File>()?.scaling.validate(document, &files, fixed, None)
        });
        read.map_err(|found| found.iter().map(ToString::to_string).collect())
    }

    #[track_caller]
    fn check(text: &str, expected: &[&str]) {
        let problems = read(text, 1).expect_err(text);
        assert_eq!(problems.len(), expected.len(), "{problems:#?}");
        for (problem, part) in problems.iter().zip(expected) {
            assert!(problem.contains(part), "{part} in {problem}");
        }
    }

    const VALID: &str = "actuator = \"process\"\ndir = \"replicas\"\nports = \"7300-7399\"\n";

    #[test]
    fn omitted_keys_have_defaults() {
        let process = ProcessConfig::with_defaults(7300..=7399);
        let actuator = ActuatorConfig::Process(process);
        assert_eq!(read(VALID, 0), Ok(ScalingConfig { dir: "/etc/meridian/replicas".into(), actuator }));
    }

    #[test]
    fn all_problems_are_reported_together() {
        check("", &["scaling.actuator: is missing", "scaling.dir: is missing"]);
        check("actuator = \"docker\"\ndir = \"x\"\n", &["\"docker\" is unknown; write \"process\""]);
        check(
            "actuator = \"process\"\naddress = \"0.0.0.0\"\nports = \"9-8\"\norphan_timeout = \"never\"\ntemplate = \"/nowhere\"\n",
            &[
                "scaling.dir",
                "scaling.address: \"0.0.0.0\"",
                "scaling.ports: \"9-8\"",
                "scaling.orphan_timeout: \"never\" is not a duration; write a duration from \"1s\" to \"1h\"",
                "/nowhere",
            ],
        );
        for ports in ["0-9", "7300", "7300-", "a-b", "1-65536"] {
            check(&VALID.replace("7300-7399", ports), &["is not a range of ports"]);
        }
        check(
            &format!("{VALID}prots = \"1-2\""),
            &["scaling.prots: unknown key `prots`; did you mean ports?"],
        );
        let both = format!("{VALID}port = 1\nnamespace = \"x\"\n");
        check(&both, &["scaling.port: has no effect", "scaling.namespace: has no effect"]);
        let other =
            "actuator = \"kubernetes\"\ndir = \"x\"\nports = \"1-2\"\nnamespace = \"x\"\nname = \"a\"\n";
        check(other, &["scaling.ports: has no effect", "scaling.name: \"a\""]);
    }

    #[test]
    fn devices_are_all_of_the_machine_or_distinct_names() {
        let devices = |value: &str| {
            let config = read(&format!("{VALID}devices = {value}\n"), 0).unwrap();
            let ActuatorConfig::Process(ProcessConfig { devices, .. }) = config.actuator else {
                panic!("{value}")
            };
            devices
        };
        assert_eq!(devices("\"all\""), DeviceSelection::All);
        let names: [Device; 2] = ["0", "GPU-5f2a"].map(|name| name.parse().unwrap());
        assert_eq!(devices("[\"0\", \"GPU-5f2a\"]"), DeviceSelection::Listed(names.into()));
        for (value, problem) in [
            ("\"0\"", "scaling.devices: is a string; write \"all\", or a list such as [\"0\", \"1\"]"),
            ("4", "scaling.devices: 4 is a number; write a list"),
            ("[]", "scaling.devices: has 0 entries; write 1 to 256, or remove it"),
            ("[0]", "scaling.devices: 0 is a number; write a string"),
            ("[\"0\", \"0\"]", "scaling.devices: \"0\" is listed twice"),
            ("[\"0,1\"]", "scaling.devices: \"0,1\" is not a device; write an index"),
        ] {
            check(&format!("{VALID}devices = {value}\n"), &[problem]);
        }
        let narrow = VALID.replace("7399", "7300") + "devices = [\"0\", \"1\"]\n";
        check(&narrow, &["scaling.ports: has 1 ports for 2 devices; widen it"]);
        let other = "actuator = \"kubernetes\"\ndir = \"x\"\nnamespace = \"x\"\ndevices = \"all\"\n";
        check(other, &["scaling.devices: has no effect"]);
    }

    #[test]
    fn limit_of_replicas_is_enforced() {
        let last = |ports: usize| VALID.replace("7399", &(7299 + ports).to_string());
        assert!(read(&last(SPOKE_REPLICAS_MAX - 3), 3).is_ok());
        assert!(read(&last(SPOKE_REPLICAS_MAX - 2), 3).unwrap_err()[0].contains("at most 256"));
    }

    #[test]
    fn a_template_must_not_have_the_keys_that_the_spoke_writes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = format!("{VALID}template = {:?}", file.path());
        std::fs::write(file.path(), "[threads]\nengine = 2\n").unwrap();
        let ActuatorConfig::Process(read_as) = read(&text, 0).unwrap().actuator else { panic!("{text}") };
        assert_eq!((read_as.template.as_str(), read_as.has_identity), ("[threads]\nengine = 2\n", false));
        std::fs::write(file.path(), "[identity]\ndir = \"/etc/meridian/replica\"\n").unwrap();
        let ActuatorConfig::Process(read_as) = read(&text, 0).unwrap().actuator else { panic!("{text}") };
        assert!(read_as.has_identity);
        std::fs::write(file.path(), "names = []\nlisten = \"x\"\n").unwrap();
        check(&text, &["has listen, names, which the spoke writes"]);
        std::fs::write(file.path(), "names = ").unwrap();
        assert_eq!(read(&text, 0).unwrap_err().len(), 1);
    }
}
