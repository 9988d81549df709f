//! `[scaling]` of `spoke.toml`: the actuator, which starts and stops the region's replicas.

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use regions::duration;
use serde::Deserialize;

use super::Problems;
use super::kubernetes::{KubernetesConfig, RawKubernetes};

/// Maximum number of replicas of one spoke: one process polls the status of each five times a second.
pub const REPLICAS_MAX: usize = 256;

/// Default of `scaling.orphan_timeout`.
const ORPHAN_TIMEOUT_DEFAULT: Duration = Duration::from_secs(60);
/// Range of `scaling.orphan_timeout`: long enough for a restart of the spoke, short enough not to leave replicas
/// behind.
const ORPHAN_TIMEOUT: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(3600);
/// Keys of a replica's configuration that the spoke writes.
const RESERVED_KEYS: [&str; 5] = ["listen", "names", "model", "task", "engine"];

/// Keys, as parsed.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawScaling {
    actuator: Option<String>,
    dir: Option<PathBuf>,
    address: Option<String>,
    ports: Option<String>,
    program: Option<PathBuf>,
    template: Option<PathBuf>,
    orphan_timeout: Option<String>,
    namespace: Option<String>,
    workload: Option<String>,
    name: Option<String>,
    port: Option<u16>,
    api: Option<String>,
    token_file: Option<PathBuf>,
    ca_file: Option<PathBuf>,
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
    /// Time for which a replica continues without a running spoke.
    pub orphan_timeout: Duration,
}

impl Problems {
    /// Parses `[scaling]`, if present; `fixed` is the number of replicas of the file.
    pub(super) fn scaling(
        &mut self,
        given: Option<RawScaling>,
        base: &Path,
        fixed: usize,
    ) -> Option<ScalingConfig> {
        let RawScaling {
            actuator,
            dir,
            address,
            ports,
            program,
            template,
            orphan_timeout,
            namespace,
            workload,
            name,
            port,
            api,
            token_file,
            ca_file,
        } = given?;
        let dir = self.need("scaling.dir", dir, "\"replicas\"").map(|dir| base.join(dir));
        let actuator = self.need("scaling.actuator", actuator, "\"process\" or \"kubernetes\"")?;
        let of_processes = [
            ("address", address.is_some()),
            ("ports", ports.is_some()),
            ("program", program.is_some()),
            ("template", template.is_some()),
            ("orphan_timeout", orphan_timeout.is_some()),
        ];
        let of_kubernetes = [
            ("namespace", namespace.is_some()),
            ("workload", workload.is_some()),
            ("name", name.is_some()),
            ("port", port.is_some()),
            ("api", api.is_some()),
            ("token_file", token_file.is_some()),
            ("ca_file", ca_file.is_some()),
        ];
        let actuator = match actuator.as_str() {
            "process" => {
                self.not_of(&actuator, &of_kubernetes);
                let address = self.replicas_address(address);
                let ports = self.ports(ports, fixed);
                let template = self.template(template, base);
                let orphan_timeout = self.orphan_timeout(orphan_timeout);
                let program = program.map(|program| base.join(program));
                let (address, ports, template) = (address?, ports?, template?);
                let orphan_timeout = orphan_timeout?;
                ActuatorConfig::Process(ProcessConfig { address, ports, program, template, orphan_timeout })
            }
            "kubernetes" => {
                self.not_of(&actuator, &of_processes);
                let raw = RawKubernetes { namespace, workload, name, port, api, token_file, ca_file };
                ActuatorConfig::Kubernetes(self.kubernetes(raw, base)?)
            }
            other => {
                self.note(format!(
                    "scaling.actuator = \"{other}\" is unknown; write \"process\" or \"kubernetes\""
                ));
                return None;
            }
        };
        Some(ScalingConfig { dir: dir?, actuator })
    }

    /// Reports keys that belong to the other actuator.
    fn not_of(&mut self, actuator: &str, others: &[(&str, bool)]) {
        for (key, _) in others.iter().filter(|(_, given)| *given) {
            self.note(format!("scaling.{key} has no effect with actuator \"{actuator}\"; remove it"));
        }
    }

    fn replicas_address(&mut self, given: Option<String>) -> Option<IpAddr> {
        let text = given.unwrap_or_else(|| "127.0.0.1".to_owned());
        let address = text.parse::<IpAddr>().ok();
        let address = address.filter(|address| !address.is_unspecified() && !address.is_multicast());
        if address.is_none() {
            self.note(format!(
                "scaling.address = \"{text}\" is not an address of this machine; write one such as \"127.0.0.1\", without a port"
            ));
        }
        address
    }

    fn ports(&mut self, given: Option<String>, fixed: usize) -> Option<RangeInclusive<u16>> {
        let text = self.need("scaling.ports", given, "\"7300-7399\"")?;
        let range = text.split_once('-').and_then(|(from, to)| Some(from.parse().ok()?..=to.parse().ok()?));
        let Some(range) = range.filter(|range| *range.start() > 0 && !range.is_empty()) else {
            self.note(format!(
                "scaling.ports = \"{text}\" is not a range of ports; write the first and the last, such as \"7300-7399\""
            ));
            return None;
        };
        if range.len() + fixed > REPLICAS_MAX {
            self.note(format!(
                "scaling.ports = \"{text}\" has {} ports and there are {fixed} [[replica]]; a spoke has at most {REPLICAS_MAX} \
                 replicas",
                range.len()
            ));
            return None;
        }
        Some(range)
    }

    fn template(&mut self, given: Option<PathBuf>, base: &Path) -> Option<String> {
        let Some(path) = given.map(|path| base.join(path)) else {
            return Some(String::new());
        };
        let text = self.file("scaling.template", &path)?;
        let table = match text.parse::<toml::Table>() {
            Ok(table) => table,
            Err(error) => {
                self.note(format!("{}: {}", path.display(), error.to_string().trim_end()));
                return None;
            }
        };
        let ours: Vec<_> = RESERVED_KEYS.into_iter().filter(|key| table.contains_key(*key)).collect();
        if ours.is_empty() {
            return Some(text);
        }
        self.note(format!(
            "scaling.template = \"{}\" has {}, which the spoke writes for each replica; remove it",
            path.display(),
            ours.join(", ")
        ));
        None
    }

    fn orphan_timeout(&mut self, given: Option<String>) -> Option<Duration> {
        let Some(text) = given else { return Some(ORPHAN_TIMEOUT_DEFAULT) };
        let time = duration::parse(&text).filter(|time| ORPHAN_TIMEOUT.contains(time));
        if time.is_none() {
            let [from, to] = [*ORPHAN_TIMEOUT.start(), *ORPHAN_TIMEOUT.end()].map(duration::write);
            self.note(format!(
                "scaling.orphan_timeout = \"{text}\" is not a duration from {from} to {to}; write one such as \"60s\""
            ));
        }
        time
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, fixed: usize) -> Result<ScalingConfig, Vec<String>> {
        let raw: RawScaling = toml::from_str(text).map_err(|error| vec![error.to_string()])?;
        let mut problems = Problems::default();
        let read = problems.scaling(Some(raw), Path::new("/etc/meridian"), fixed);
        read.filter(|_| problems.0.is_empty()).ok_or(problems.0)
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
        let process = ProcessConfig {
            address: [127, 0, 0, 1].into(),
            ports: 7300..=7399,
            program: None,
            template: String::new(),
            orphan_timeout: ORPHAN_TIMEOUT_DEFAULT,
        };
        let actuator = ActuatorConfig::Process(process);
        assert_eq!(read(VALID, 0), Ok(ScalingConfig { dir: "/etc/meridian/replicas".into(), actuator }));
    }

    #[test]
    fn all_problems_are_reported_together() {
        check("", &["scaling.dir is missing", "scaling.actuator is missing"]);
        check("actuator = \"docker\"\ndir = \"x\"\n", &["\"docker\" is unknown; write \"process\""]);
        check(
            "actuator = \"process\"\naddress = \"0.0.0.0\"\nports = \"9-8\"\norphan_timeout = \"never\"\ntemplate = \"/nowhere\"\n",
            &[
                "scaling.dir",
                "scaling.address = \"0.0.0.0\"",
                "scaling.ports = \"9-8\"",
                "/nowhere",
                "scaling.orphan_timeout",
            ],
        );
        for ports in ["0-9", "7300", "7300-", "a-b", "1-65536"] {
            check(&VALID.replace("7300-7399", ports), &["is not a range of ports"]);
        }
        check(&format!("{VALID}prots = \"1-2\""), &["unknown field"]);
        let both = format!("{VALID}port = 1\nnamespace = \"x\"\n");
        check(&both, &["scaling.namespace has no effect", "scaling.port has no effect"]);
        let other =
            "actuator = \"kubernetes\"\ndir = \"x\"\nports = \"1-2\"\nnamespace = \"x\"\nname = \"a\"\n";
        check(other, &["scaling.ports has no effect", "scaling.name = \"a\""]);
    }

    #[test]
    fn limit_of_replicas_is_enforced() {
        let last = |ports: usize| VALID.replace("7399", &(7299 + ports).to_string());
        assert!(read(&last(REPLICAS_MAX - 3), 3).is_ok());
        assert!(read(&last(REPLICAS_MAX - 2), 3).unwrap_err()[0].contains("at most 256"));
    }

    #[test]
    fn a_template_must_not_have_the_keys_that_the_spoke_writes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = format!("{VALID}template = {:?}", file.path());
        std::fs::write(file.path(), "[threads]\nengine = 2\n").unwrap();
        let ActuatorConfig::Process(read_as) = read(&text, 0).unwrap().actuator else { panic!("{text}") };
        assert_eq!(read_as.template, "[threads]\nengine = 2\n");
        std::fs::write(file.path(), "names = []\nlisten = \"x\"\n").unwrap();
        check(&text, &["has listen, names, which the spoke writes"]);
        std::fs::write(file.path(), "names = ").unwrap();
        assert_eq!(read(&text, 0).unwrap_err().len(), 1);
    }
}
