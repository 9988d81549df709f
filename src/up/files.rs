//! Files of a local fleet: a configuration per process, as an operator would write it, and paths of logs and state.

use super::authority::{FleetAuthority, MemberIdentity, REPLICAS};
use super::certificates::{IssuedCertificate, write_secret};
use super::etcd::{EtcdCluster, KEEP_ALIVE_MS};
use super::plan::{FleetPlan, ScriptedReplicas};
use super::process::{ProcessSpec, ReadinessSignal};
use anyhow::{Context, Result};
use regions::id::RegionId;
use regions::spiffe::Role;
use regions::{EngineSpec, Task};
use serde_json::Value;
use std::fmt::Write;
use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

/// Returns `$XDG_STATE_HOME/meridian`, or its default (XDG Base Directory Specification 0.8).
pub(super) fn state_dir() -> Result<PathBuf> {
    let absolute =
        |variable: &str| std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")));
    Ok(base.context("neither XDG_STATE_HOME nor HOME is set; give a directory with --dir")?.join("meridian"))
}

/// The one tenant.
const TENANT: &str = "local";
/// Folder of the queues of jobs.
const JOBS: &str = "jobs";
/// Time for which a replica outlives its spoke: enough for a restart of the spoke, and short after the end of the fleet.
const ORPHAN_TIMEOUT: &str = "10s";

/// Maximum length of the path of the handover socket: 107 bytes, five of which the gateway needs while it starts.
const SOCKET_PATH_BYTES_MAX: usize = 102;

/// Directory of a local fleet, and writer of its files.
pub(super) struct FleetFiles {
    pub(super) dir: PathBuf,
}

impl FleetFiles {
    pub(super) fn logs(&self) -> PathBuf {
        self.dir.join("logs")
    }

    fn write(&self, name: &str, document: TomlDocument) -> Result<PathBuf> {
        let file = self.dir.join(format!("{name}.toml"));
        document.write(&file).with_context(|| format!("{} cannot be written", file.display()))?;
        Ok(file)
    }

    /// Returns the data directory of the hub's embedded store.
    pub(super) fn hub_data(&self) -> PathBuf {
        self.dir.join("hub")
    }

    fn spec(
        &self,
        role: &str,
        region: Option<&RegionId>,
        number: usize,
        file: &Path,
        member: Option<MemberIdentity>,
    ) -> ProcessSpec {
        let mut arguments = vec![role.to_owned()];
        let mut name = role.to_owned();
        if let Some(region) = region {
            arguments.extend(["--region".to_owned(), region.to_string()]);
            name = format!("{role} {region}");
        }
        if number > 0 {
            name = format!("{name} #{}", number + 1);
        }
        arguments.extend(["--config".to_owned(), file.display().to_string()]);
        let log = self.logs().join(format!("{}.log", name.replace(['/', ' '], "-")));
        ProcessSpec { name, arguments, member, log, ready: ReadinessSignal::ReadyLine, takes_over: false }
    }

    fn catalogue(document: TomlDocument, plan: &FleetPlan) -> TomlDocument {
        match &plan.catalogue_file {
            Some(file) => document.text("catalogue", file.display()),
            None => document,
        }
    }

    /// Adds the `[receipts]` table of the process `name`; it must follow all plain keys.
    fn receipts(&self, document: TomlDocument, name: &str) -> Result<TomlDocument> {
        let key = self.dir.join("receipts-key");
        if !key.exists() {
            write_secret(&key, &format!("{:032x}", rand::random::<u128>()))
                .with_context(|| format!("{} cannot be written", key.display()))?;
        }
        let dir = self.dir.join("receipts").join(name);
        Ok(document.line("\n[receipts]").text("dir", dir.display()).text("key_file", key.display()))
    }

    /// Returns the file with the webhook secret of the tenant, which is the same after a restart of the fleet.
    pub(super) fn webhook_secrets(&self) -> Result<PathBuf> {
        let file = self.dir.join("webhook-secrets");
        if !file.exists() {
            // 48 hexadecimal digits, which are base64 as well: 36 bytes with 192 random bits.
            let secret = format!("{:032x}{:016x}", rand::random::<u128>(), rand::random::<u64>());
            write_secret(&file, &format!("{TENANT} whsec_{secret}\n"))
                .with_context(|| format!("{} cannot be written", file.display()))?;
        }
        Ok(file)
    }

    /// Writes the targets of a Prometheus that observes the fleet.
    pub(super) fn targets(&self, targets: &Value) -> Result<PathBuf> {
        let file = self.dir.join("targets.json");
        fs::write(&file, format!("{targets:#}\n"))
            .with_context(|| format!("{} cannot be written", file.display()))?;
        Ok(file)
    }

    /// Writes the configuration of a hub, counted from zero. A console has its own address, and that of the control API.
    pub(super) fn hub(&self, plan: &FleetPlan, settings: &HubSettings<'_>) -> Result<ProcessSpec> {
        let HubSettings { number, listen, operations, console, etcd, authority } = *settings;
        let deployments = self.dir.join("deployments.toml");
        fs::write(&deployments, &plan.deployments_text)
            .with_context(|| format!("{} cannot be written", deployments.display()))?;
        let document = TomlDocument::new("Hub of a local fleet.")
            .text("listen", listen)
            .text("operations", operations)
            .text("deployments", deployments.display());
        let document = Self::catalogue(document, plan);
        let document = match etcd {
            None => document.text("data", self.hub_data().display()),
            Some(etcd) => document
                .line("\n[store]")
                .text("kind", "etcd")
                .line(&format!("endpoints = {:?}", etcd.endpoints()))
                .line(&format!("keep_alive_ms = {KEEP_ALIVE_MS}"))
                .text("ca", etcd.certificates.authority.display())
                .text("certificate", etcd.certificates.hub.certificate.display())
                .text("key", etcd.certificates.hub.key.display()),
        };
        // The certificates of all hubs name the region of the gateway, where they run.
        let place = plan.catalogue.get(&plan.regions[0]).context("a planned region is in the catalogue")?;
        let name = if number == 0 { "hub".to_owned() } else { format!("hub-{}", number + 1) };
        let (identity, member) = match number {
            0 => (authority.first_hub().to_owned(), None),
            _ => {
                let member = authority.member(&name, Role::Hub, place);
                (member.dir.clone(), Some(member))
            }
        };
        let document = document
            .line("\n[identity]")
            .text("dir", identity.display())
            .line("\n[authority]")
            .text("listen", authority.address(number))
            .text("dir", authority.dir().display());
        let document = match console {
            Some((console, control)) => {
                let drills = format!("http://{control}");
                document.line("\n[console]").text("listen", console).text("drills", drills)
            }
            None => document,
        };
        Ok(self.spec("hub", None, number, &self.write(&name, document)?, member))
    }

    pub(super) fn replica(
        &self,
        plan: &FleetPlan,
        place: &ReplicaPlace<'_>,
        (model, task, engine): (&str, Task, EngineSpec),
    ) -> Result<ProcessSpec> {
        let ReplicaPlace { region, number, listen, operations, names, authority } = *place;
        let EngineSpec { kind, precision } = engine;
        let document = TomlDocument::new(&format!("Replica in {region}."))
            .text("listen", listen)
            .text("operations", operations)
            .line(&format!("names = {names:?}"))
            .text("model", model)
            .text("task", task)
            .line(&format!("engine = {{ kind = \"{kind}\", precision = \"{precision}\" }}"));
        let name = format!("replica-{}-{number}", region.as_str().replace('/', "-"));
        let (document, member) = member(plan, document, authority, &name, Role::Replica, region)?;
        Ok(self.spec("replica", Some(region), number, &self.write(&name, document)?, Some(member)))
    }

    /// Returns the specification of a scripted replica.
    pub(super) fn scripted(
        &self,
        plan: &FleetPlan,
        place: &ReplicaPlace<'_>,
        scripted: &ScriptedReplicas,
    ) -> Result<ProcessSpec> {
        let ReplicaPlace { region, number, listen, operations, names, authority } = *place;
        let file = format!("replica-{}-{number}", region.as_str().replace('/', "-"));
        let document = TomlDocument::new(&format!("Scripted replica in {region}."));
        let (document, member) = member(plan, document, authority, &file, Role::Replica, region)?;
        let file = self.write(&file, document)?;
        let name = format!("replica {region}");
        let name = if number > 0 { format!("{name} #{}", number + 1) } else { name };
        let (listen, speed) = (listen.to_string(), scripted.inputs_per_second.to_string());
        let (operations, file) = (operations.to_string(), file.display().to_string());
        let options = [
            ("--listen", &listen),
            ("--inputs-per-second", &speed),
            ("--operations", &operations),
            ("--config", &file),
        ];
        let names = names.iter().map(|name| ("--name", name));
        let options =
            options.into_iter().chain(names).flat_map(|(option, value)| [option.to_owned(), value.clone()]);
        let arguments = std::iter::once("scripted-replica".to_owned()).chain(options).collect();
        let log = self.logs().join(format!("{}.log", name.replace(['/', ' '], "-")));
        let (member, ready) = (Some(member), ReadinessSignal::ReadyLine);
        Ok(ProcessSpec { name, arguments, member, log, ready, takes_over: false })
    }

    pub(super) fn spoke(
        &self,
        plan: &FleetPlan,
        region: &RegionId,
        settings: &SpokeSettings<'_>,
    ) -> Result<ProcessSpec> {
        let SpokeSettings { number, listen, advertise, operations, hubs, replicas, replica_ports, authority } =
            settings;
        let mut document = TomlDocument::new(&format!("Spoke of {region}."))
            .text("region", region)
            .text("instance", format!("spoke-{}", number + 1))
            .text("listen", listen)
            .text("advertise", advertise)
            .text("operations", operations)
            .line(&hub_line(hubs));
        let mut name = format!("spoke-{}", region.as_str().replace('/', "-"));
        if *number > 0 {
            name = format!("{name}-{}", number + 1);
        }
        let (with_identity, member) = member(plan, document, authority, &name, Role::Spoke, region)?;
        document = self.receipts(with_identity, &name)?;
        // A queue in a file has one host.
        if *number == 0 {
            document = document
                .line("\n[jobs]")
                .text("dir", self.dir.join(JOBS).join(&name).display())
                .text("webhook_secrets_file", self.webhook_secrets()?.display())
                .line("webhook_private_targets = [\"127.0.0.0/8\", \"::1\"]");
        }
        for replica in *replicas {
            document = document.line("\n[[replica]]").text("endpoint", replica);
        }
        if let Some(ports) = replica_ports {
            document = document
                .line("\n[scaling]")
                .text("actuator", "process")
                .text("dir", self.dir.join(REPLICAS).join(&name).display())
                .text("address", listen.ip())
                .text("ports", format!("{}-{}", ports.start(), ports.end()))
                .text("orphan_timeout", ORPHAN_TIMEOUT);
        }
        Ok(self.spec("spoke", Some(region), *number, &self.write(&name, document)?, Some(member)))
    }

    pub(super) fn gateway(
        &self,
        plan: &FleetPlan,
        region: &RegionId,
        hubs: &[SocketAddr],
        settings: &GatewaySettings<'_>,
    ) -> Result<ProcessSpec> {
        let GatewaySettings { number, listen, operations, key, certificate, authority } = settings;
        // The first gateway has the names that it would have alone.
        let name = match number {
            0 => "gateway".to_owned(),
            _ => format!("gateway-{}", region.as_str().replace('/', "-")),
        };
        let key_file = self.dir.join("key");
        write_secret(&key_file, key).with_context(|| format!("{} cannot be written", key_file.display()))?;
        let tenants = TomlDocument::new("Tenants of a local fleet.")
            .line("[[tenant]]")
            .text("name", TENANT)
            .text("key_file", key_file.display());
        let document = TomlDocument::new("Gateway of a local fleet.")
            .text("listen", listen)
            .text("operations", operations)
            .text("region", region)
            .line(&hub_line(hubs))
            .text("snapshot", self.dir.join(format!("{name}-routes")).display())
            .text("tenants", self.write("tenants", tenants)?.display())
            .line(&format!("trusted_peers = [\"{}\"]", listen.ip()));
        let document = match source_address(*number, listen.ip()) {
            Some(address) => document.text("source_address", address),
            None => document,
        };
        // A restart with a handover rejects no request; the socket's path must be short enough.
        let handover = self.dir.join(format!("{name}.handover"));
        let takes_over = handover.as_os_str().len() <= SOCKET_PATH_BYTES_MAX;
        let document = if takes_over { document.text("handover", handover.display()) } else { document };
        let (document, member) = member(plan, document, authority, &name, Role::Gateway, region)?;
        // No load balancer in front of this gateway has to notice that it stops.
        let mut document = document.line("\n[timeouts]").text("lame_duck", "0s");
        if let Some(IssuedCertificate { certificate, key }) = certificate {
            document = document.line("\n[tls]");
            document = document.text("certificate", certificate.display()).text("key", key.display());
        }
        let document = self.receipts(document, &name)?;
        let explanations = self.dir.join("explanations").join(&name);
        let document = document.line("\n[explanations]").text("dir", explanations.display());
        let file = self.write(&name, document)?;
        let log = self.logs().join(format!("{name}.log"));
        let name = if *number == 0 { name } else { format!("gateway {region}") };
        Ok(ProcessSpec { name, log, takes_over, ..self.spec("gateway", None, 0, &file, Some(member)) })
    }
}

/// Returns the local address of a gateway's connections, by which links tell it from the others; the first one has that of
/// every other process. There are at most as many gateways as regions, so the last byte does not overflow.
pub(super) fn source_address(number: usize, loopback: IpAddr) -> Option<IpAddr> {
    match loopback {
        IpAddr::V4(_) if number > 0 => {
            u8::try_from(number + 1).ok().map(|last| IpAddr::from([127, 0, 0, last]))
        }
        IpAddr::V4(_) | IpAddr::V6(_) => None,
    }
}

/// Adds the catalogue and the identity of the process `name`; tables must follow.
fn member(
    plan: &FleetPlan,
    document: TomlDocument,
    authority: &FleetAuthority,
    name: &str,
    role: Role,
    region: &RegionId,
) -> Result<(TomlDocument, MemberIdentity)> {
    let place = plan.catalogue.get(region).context("a planned region is in the catalogue")?;
    let member = authority.member(name, role, place);
    let document = FleetFiles::catalogue(document, plan);
    Ok((document.line("\n[identity]").text("dir", member.dir.display()), member))
}

/// Settings of a replica.
#[derive(Clone, Copy)]
pub(super) struct ReplicaPlace<'a> {
    pub(super) region: &'a RegionId,
    /// Number within its region, counted from zero.
    pub(super) number: usize,
    pub(super) listen: SocketAddr,
    pub(super) operations: SocketAddr,
    /// Deployments that it serves.
    pub(super) names: &'a [String],
    pub(super) authority: &'a FleetAuthority,
}

/// Settings of a hub: its addresses, its store, and the authority whose certificates it issues.
pub(super) struct HubSettings<'a> {
    /// Number among the hubs, counted from zero.
    pub(super) number: usize,
    pub(super) listen: SocketAddr,
    pub(super) operations: SocketAddr,
    /// Listener of the console and that of the control API; the first hub has them.
    pub(super) console: Option<(SocketAddr, SocketAddr)>,
    /// etcd cluster of the hubs; `None` with an embedded store.
    pub(super) etcd: Option<&'a EtcdCluster>,
    pub(super) authority: &'a FleetAuthority,
}

/// Settings of the gateway: client and operations addresses, API key, and the certificate for clients if TLS is on.
pub(super) struct GatewaySettings<'a> {
    /// Number among the gateways, counted from zero.
    pub(super) number: usize,
    pub(super) listen: SocketAddr,
    pub(super) operations: SocketAddr,
    pub(super) key: &'a str,
    pub(super) certificate: Option<&'a IssuedCertificate>,
    pub(super) authority: &'a FleetAuthority,
}

/// Settings of a spoke: its address, the link's address for gateways, the operations address, and its replicas.
pub(super) struct SpokeSettings<'a> {
    /// Number within its region, counted from zero.
    pub(super) number: usize,
    pub(super) listen: SocketAddr,
    pub(super) advertise: SocketAddr,
    pub(super) operations: SocketAddr,
    pub(super) hubs: &'a [SocketAddr],
    pub(super) replicas: &'a [SocketAddr],
    /// Ports of the replicas that the spoke starts; `None` if it starts none.
    pub(super) replica_ports: Option<RangeInclusive<u16>>,
    pub(super) authority: &'a FleetAuthority,
}

/// Returns the line `hub = "http://…"`, or a list of several.
fn hub_line(hubs: &[SocketAddr]) -> String {
    match hubs {
        [hub] => format!("hub = \"https://{hub}\""),
        hubs => format!("hub = {:?}", hubs.iter().map(|hub| format!("https://{hub}")).collect::<Vec<_>>()),
    }
}

/// Writer of a TOML configuration file for one process.
pub(crate) struct TomlDocument(String);

impl TomlDocument {
    pub(crate) fn new(about: &str) -> TomlDocument {
        TomlDocument(format!("# {about}\n# Written by `meridian up`; overwritten by the next start.\n\n"))
    }

    /// Adds `key = "value"`, escaped.
    pub(crate) fn text(mut self, key: &str, value: impl ToString) -> TomlDocument {
        let value = toml::Value::String(value.to_string());
        writeln!(self.0, "{key} = {value}").expect("writing to a String cannot fail");
        self
    }

    /// Adds a line verbatim.
    pub(crate) fn line(mut self, line: &str) -> TomlDocument {
        writeln!(self.0, "{line}").expect("writing to a String cannot fail");
        self
    }

    pub(crate) fn write(self, file: &Path) -> io::Result<()> {
        std::fs::write(file, self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_escaped_and_stays_in_its_line() {
        let TomlDocument(text) = TomlDocument::new("a test").text("key", "a\"b\nc = 1");
        let parsed: toml::Table = text.parse().expect("valid TOML");
        assert_eq!(parsed["key"].as_str(), Some("a\"b\nc = 1"));
        assert_eq!(parsed.len(), 1);
    }
}
