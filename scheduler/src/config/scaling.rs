//! `[scaling]` of `spoke.toml`: who starts and stops the region's replicas.

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use regions::duration;
use serde::Deserialize;

use super::kubernetes::{KubernetesConfig, RawKubernetes};
use super::{Problems, REPLICAS_MAX};

/// How long a replica goes on without anybody who looks after it, when nobody says.
const ALONE_DEFAULT: Duration = Duration::from_secs(60);
/// At least long enough for a spoke to be started again, and not so long that it is forgotten.
const ALONE: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(3600);
/// The keys of a replica's file that are the spoke's to write.
const OURS: [&str; 5] = ["listen", "names", "model", "task", "engine"];

/// As written.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawScaling {
    actuator: Option<String>,
    dir: Option<PathBuf>,
    address: Option<String>,
    ports: Option<String>,
    program: Option<PathBuf>,
    template: Option<PathBuf>,
    alone: Option<String>,
    namespace: Option<String>,
    workload: Option<String>,
    name: Option<String>,
    port: Option<u16>,
    api: Option<String>,
    token_file: Option<PathBuf>,
    ca_file: Option<PathBuf>,
}

/// Who starts and stops the region's replicas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScalingConfig {
    /// What is kept over a restart: the route table, and who runs.
    pub dir: PathBuf,
    /// Who.
    pub actuator: ActuatorConfig,
}

/// Who starts and stops replicas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ActuatorConfig {
    /// The spoke itself, as processes beside it.
    Process(ProcessConfig),
    /// A Kubernetes cluster, as pods of its workloads.
    Kubernetes(KubernetesConfig),
}

/// Replicas as processes on the spoke's machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessConfig {
    /// Where they listen.
    pub address: IpAddr,
    /// And at which ports: as many replicas as there are.
    pub ports: RangeInclusive<u16>,
    /// What is started as `PROGRAM replica --config FILE`; without it, the program that the spoke is.
    pub program: Option<PathBuf>,
    /// What stands in each replica's file beside that which the spoke writes.
    pub template: String,
    /// How long a replica goes on while no spoke looks after it.
    pub alone: Duration,
}

impl Problems {
    /// Who starts replicas, if anybody does; `fixed` are those of the file.
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
            alone,
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
            ("alone", alone.is_some()),
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
                let alone = self.alone(alone);
                let program = program.map(|program| base.join(program));
                let (address, ports, template, alone) = (address?, ports?, template?, alone?);
                ActuatorConfig::Process(ProcessConfig { address, ports, program, template, alone })
            }
            "kubernetes" => {
                self.not_of(&actuator, &of_processes);
                let raw = RawKubernetes { namespace, workload, name, port, api, token_file, ca_file };
                ActuatorConfig::Kubernetes(self.kubernetes(raw, base)?)
            }
            other => {
                self.note(format!(
                    "scaling.actuator = \"{other}\" is not known; write \"process\" or \"kubernetes\""
                ));
                return None;
            }
        };
        Some(ScalingConfig { dir: dir?, actuator })
    }

    /// Keys that say something to the other actuator only.
    fn not_of(&mut self, actuator: &str, others: &[(&str, bool)]) {
        for (key, _) in others.iter().filter(|(_, given)| *given) {
            self.note(format!("scaling.{key} means nothing to the actuator \"{actuator}\"; leave it out"));
        }
    }

    fn replicas_address(&mut self, given: Option<String>) -> Option<IpAddr> {
        let text = given.unwrap_or_else(|| "127.0.0.1".to_owned());
        let address = text.parse::<IpAddr>().ok();
        let address = address.filter(|address| !address.is_unspecified() && !address.is_multicast());
        if address.is_none() {
            self.note(format!(
                "scaling.address = \"{text}\" is no address of this machine; write one as \"127.0.0.1\", without a port"
            ));
        }
        address
    }

    fn ports(&mut self, given: Option<String>, fixed: usize) -> Option<RangeInclusive<u16>> {
        let text = self.need("scaling.ports", given, "\"7300-7399\"")?;
        let range = text.split_once('-').and_then(|(from, to)| Some(from.parse().ok()?..=to.parse().ok()?));
        let Some(range) = range.filter(|range| *range.start() > 0 && !range.is_empty()) else {
            self.note(format!(
                "scaling.ports = \"{text}\" is no range of ports; write the first and the last, as \"7300-7399\""
            ));
            return None;
        };
        if range.len() + fixed > REPLICAS_MAX {
            self.note(format!(
                "scaling.ports = \"{text}\" are {} and there are {fixed} [[replica]]; {REPLICAS_MAX} replicas fit behind \
                 one spoke",
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
        let ours: Vec<_> = OURS.into_iter().filter(|key| table.contains_key(*key)).collect();
        if ours.is_empty() {
            return Some(text);
        }
        self.note(format!(
            "scaling.template = \"{}\" has {}, which the spoke writes for each replica; leave it out",
            path.display(),
            ours.join(", ")
        ));
        None
    }

    fn alone(&mut self, given: Option<String>) -> Option<Duration> {
        let Some(text) = given else { return Some(ALONE_DEFAULT) };
        let time = duration::parse(&text).filter(|time| ALONE.contains(time));
        if time.is_none() {
            let [from, to] = [*ALONE.start(), *ALONE.end()].map(duration::write);
            self.note(format!(
                "scaling.alone = \"{text}\" is no time from {from} to {to}; write one as \"60s\""
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
    fn check(text: &str, wanted: &[&str]) {
        let problems = read(text, 1).expect_err(text);
        assert_eq!(problems.len(), wanted.len(), "{problems:#?}");
        for (problem, part) in problems.iter().zip(wanted) {
            assert!(problem.contains(part), "{part} in {problem}");
        }
    }

    const SOUND: &str = "actuator = \"process\"\ndir = \"replicas\"\nports = \"7300-7399\"\n";

    #[test]
    fn what_is_left_out_has_its_default() {
        let process = ProcessConfig {
            address: [127, 0, 0, 1].into(),
            ports: 7300..=7399,
            program: None,
            template: String::new(),
            alone: ALONE_DEFAULT,
        };
        let actuator = ActuatorConfig::Process(process);
        assert_eq!(read(SOUND, 0), Ok(ScalingConfig { dir: "/etc/meridian/replicas".into(), actuator }));
    }

    #[test]
    fn all_that_is_wrong_is_told_at_once() {
        check("", &["scaling.dir is missing", "scaling.actuator is missing"]);
        check("actuator = \"docker\"\ndir = \"x\"\n", &["\"docker\" is not known; write \"process\""]);
        check(
            "actuator = \"process\"\naddress = \"0.0.0.0\"\nports = \"9-8\"\nalone = \"never\"\ntemplate = \"/nowhere\"\n",
            &[
                "scaling.dir",
                "scaling.address = \"0.0.0.0\"",
                "scaling.ports = \"9-8\"",
                "/nowhere",
                "scaling.alone",
            ],
        );
        for ports in ["0-9", "7300", "7300-", "a-b", "1-65536"] {
            check(&SOUND.replace("7300-7399", ports), &["is no range of ports"]);
        }
        check(&format!("{SOUND}prots = \"1-2\""), &["unknown field"]);
        let both = format!("{SOUND}port = 1\nnamespace = \"x\"\n");
        check(&both, &["scaling.namespace means nothing", "scaling.port means nothing"]);
        let other =
            "actuator = \"kubernetes\"\ndir = \"x\"\nports = \"1-2\"\nnamespace = \"x\"\nname = \"a\"\n";
        check(other, &["scaling.ports means nothing", "scaling.name = \"a\""]);
    }

    #[test]
    fn as_many_ports_as_replicas_fit_behind_a_spoke_are_taken_and_one_more_is_not() {
        let last = |ports: usize| SOUND.replace("7399", &(7299 + ports).to_string());
        assert!(read(&last(REPLICAS_MAX - 3), 3).is_ok());
        assert!(read(&last(REPLICAS_MAX - 2), 3).unwrap_err()[0].contains("256 replicas fit"));
    }

    #[test]
    fn a_template_leaves_to_the_spoke_what_it_writes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = format!("{SOUND}template = {:?}", file.path());
        std::fs::write(file.path(), "[threads]\nengine = 2\n").unwrap();
        let ActuatorConfig::Process(read_as) = read(&text, 0).unwrap().actuator else { panic!("{text}") };
        assert_eq!(read_as.template, "[threads]\nengine = 2\n");
        std::fs::write(file.path(), "names = []\nlisten = \"x\"\n").unwrap();
        check(&text, &["has listen, names, which the spoke writes"]);
        std::fs::write(file.path(), "names = ").unwrap();
        assert_eq!(read(&text, 0).unwrap_err().len(), 1);
    }
}
