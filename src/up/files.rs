//! The files of a world: a configuration for each process, as a person would write it, and where logs and state go.

use super::etcd::{Etcd, KEEP_ALIVE_MS};
use super::identities::{Authority, Named};
use super::plan::{Plan, Scripted};
use super::process::{Ready, Spec};
use anyhow::{Context, Result};
use regions::deployment::{EngineSpec, Task};
use regions::id::RegionId;
use std::fmt::Write;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

/// `$XDG_STATE_HOME/meridian`, or its default (XDG Base Directory Specification 0.8).
pub(super) fn state_dir() -> Result<PathBuf> {
    let absolute =
        |variable: &str| std::env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")));
    Ok(base.context("neither XDG_STATE_HOME nor HOME is set; give a directory with --dir")?.join("meridian"))
}

/// How long a replica outlives its spoke: long enough for one that is restarted, and soon over when the world is gone.
const ALONE: &str = "10s";

/// The longest name of a socket that a gateway can be asked at: 107 bytes, five of which the gateway needs while it starts.
const SOCKET_NAME_BYTES_MAX: usize = 102;

/// Where a world's files are.
pub(super) struct Files {
    pub(super) dir: PathBuf,
}

impl Files {
    pub(super) fn logs(&self) -> PathBuf {
        self.dir.join("logs")
    }

    fn write(&self, name: &str, document: Document) -> Result<PathBuf> {
        let file = self.dir.join(format!("{name}.toml"));
        document.write(&file).with_context(|| format!("{} cannot be written", file.display()))?;
        Ok(file)
    }

    fn spec(&self, role: &str, region: Option<&RegionId>, number: usize, file: &Path) -> Spec {
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
        Spec { name, arguments, log, ready: Ready::Says, takes_over: false }
    }

    fn catalogue(document: Document, plan: &Plan) -> Document {
        match &plan.catalogue_file {
            Some(file) => document.text("catalogue", file.display()),
            None => document,
        }
    }

    /// The table by which the process `name` keeps receipts; it stands after all plain keys.
    fn receipts(&self, document: Document, name: &str) -> Result<Document> {
        let key = self.dir.join("receipts-key");
        if !key.exists() {
            write_secret(&key, &format!("{:032x}", rand::random::<u128>()))
                .with_context(|| format!("{} cannot be written", key.display()))?;
        }
        let dir = self.dir.join("receipts").join(name);
        Ok(document.line("\n[receipts]").text("dir", dir.display()).text("key_file", key.display()))
    }

    /// One of the hubs, counted from zero.
    pub(super) fn hub(
        &self,
        plan: &Plan,
        number: usize,
        listen: SocketAddr,
        etcd: Option<&Etcd>,
    ) -> Result<Spec> {
        let deployments = self.dir.join("deployments.toml");
        fs::write(&deployments, &plan.deployments_text)
            .with_context(|| format!("{} cannot be written", deployments.display()))?;
        let document = Document::new("The hub of a world on one machine.")
            .text("listen", listen)
            .text("deployments", deployments.display())
            .text("operator_token_file", self.operator_token()?.display())
            .text("fleet_token_file", self.fleet_token()?.display());
        let document = Self::catalogue(document, plan);
        let document = match etcd {
            None => document.text("data", self.dir.join("hub").display()),
            Some(etcd) => document
                .line("\n[store]")
                .text("kind", "etcd")
                .line(&format!("endpoints = {:?}", etcd.endpoints()))
                .line(&format!("keep_alive_ms = {KEEP_ALIVE_MS}")),
        };
        let name = if number == 0 { "hub".to_owned() } else { format!("hub-{}", number + 1) };
        Ok(self.spec("hub", None, number, &self.write(&name, document)?))
    }

    /// What an operator of this world shows: made once, so that a world that starts again knows who it was.
    pub(super) fn operator_token(&self) -> Result<PathBuf> {
        self.token("operator-token")
    }

    /// What gateways and spokes of this world show to its hubs.
    fn fleet_token(&self) -> Result<PathBuf> {
        self.token("fleet-token")
    }

    fn token(&self, name: &str) -> Result<PathBuf> {
        let file = self.dir.join(name);
        if !file.exists() {
            write_secret(&file, &format!("{:032x}", rand::random::<u128>()))
                .with_context(|| format!("{} cannot be written", file.display()))?;
        }
        Ok(file)
    }

    pub(super) fn replica(
        &self,
        region: &RegionId,
        number: usize,
        listen: SocketAddr,
        (model, task, engine): (&str, Task, EngineSpec),
        names: &[&str],
    ) -> Result<Spec> {
        let EngineSpec { kind, precision } = engine;
        let document = Document::new(&format!("A replica in {region}."))
            .text("listen", listen)
            .line(&format!("names = {names:?}"))
            .text("model", model)
            .text("task", task)
            .line(&format!("engine = {{ kind = \"{kind}\", precision = \"{precision}\" }}"));
        let name = format!("replica-{}-{number}", region.as_str().replace('/', "-"));
        Ok(self.spec("replica", Some(region), number, &self.write(&name, document)?))
    }

    /// A replica that takes its time and computes nothing.
    pub(super) fn scripted(
        &self,
        region: &RegionId,
        number: usize,
        listen: SocketAddr,
        scripted: &Scripted,
        names: &[&str],
    ) -> Spec {
        let name = format!("replica {region}");
        let name = if number > 0 { format!("{name} #{}", number + 1) } else { name };
        let speed = scripted.inputs_per_second.to_string();
        let mut arguments =
            ["scripted-replica", "--listen", &listen.to_string(), "--inputs-per-second", &speed]
                .map(str::to_owned)
                .to_vec();
        names.iter().for_each(|name| arguments.extend(["--name".to_owned(), (*name).to_owned()]));
        let log = self.logs().join(format!("{}.log", name.replace(['/', ' '], "-")));
        Spec { name, arguments, log, ready: Ready::Says, takes_over: false }
    }

    pub(super) fn spoke(&self, plan: &Plan, region: &RegionId, door: &Door<'_>) -> Result<Spec> {
        let Door { listen, advertise, operations, hubs, replicas, starts_at, authority } = door;
        let mut document = Document::new(&format!("The spoke of {region}."))
            .text("region", region)
            .text("listen", listen)
            .text("advertise", advertise)
            .text("operations", operations)
            .text("fleet_token_file", self.fleet_token()?.display())
            .line(&hub_line(hubs));
        let name = format!("spoke-{}", region.as_str().replace('/', "-"));
        document = self.receipts(Self::catalogue(document, plan), &name)?;
        let Named { certificate, key } =
            authority.region(plan.catalogue.get(region).context("a planned region is in the catalogue")?)?;
        document = document
            .line("\n[tls]")
            .text("certificate", certificate.display())
            .text("key", key.display())
            .text("client_ca", authority.file.display());
        for replica in *replicas {
            document = document.line("\n[[replica]]").text("endpoint", replica);
        }
        if let Some(ports) = starts_at {
            document = document
                .line("\n[scaling]")
                .text("actuator", "process")
                .text("dir", self.dir.join("replicas").join(&name).display())
                .text("ports", format!("{}-{}", ports.start(), ports.end()))
                .text("alone", ALONE);
        }
        Ok(self.spec("spoke", Some(region), 0, &self.write(&name, document)?))
    }

    pub(super) fn gateway(
        &self,
        plan: &Plan,
        place: &RegionId,
        hubs: &[SocketAddr],
        front: &Front<'_>,
    ) -> Result<Spec> {
        let Front { listen, operations, key, certificate, authority } = front;
        let key_file = self.dir.join("key");
        write_secret(&key_file, key).with_context(|| format!("{} cannot be written", key_file.display()))?;
        let tenants = Document::new("Who may use a world on one machine.")
            .line("[[tenant]]")
            .text("name", "local")
            .text("key_file", key_file.display());
        let document = Document::new("The gateway of a world on one machine.")
            .text("listen", listen)
            .text("operations", operations)
            .text("region", place)
            .text("fleet_token_file", self.fleet_token()?.display())
            .line(&hub_line(hubs))
            .text("snapshot", self.dir.join("gateway-routes").display())
            .text("tenants", self.write("tenants", tenants)?.display())
            .line("trusted_peers = [\"127.0.0.1\"]");
        // A restart refuses nobody, where a socket may have so long a name.
        let handover = self.dir.join("gateway.handover");
        let takes_over = handover.as_os_str().len() <= SOCKET_NAME_BYTES_MAX;
        let document = if takes_over { document.text("handover", handover.display()) } else { document };
        // Nobody stands in front of this gateway who would have to notice that it goes.
        let mut document = Self::catalogue(document, plan).line("\n[timeouts]").text("lame_duck", "0s");
        if let Some(Certificate { certificate, key }) = certificate {
            document = document.line("\n[tls]");
            document = document.text("certificate", certificate.display()).text("key", key.display());
        }
        let Named { certificate, key } =
            authority.gateway(plan.catalogue.get(place).context("a planned region is in the catalogue")?)?;
        let document = document
            .line("\n[region_tls]")
            .text("certificate", certificate.display())
            .text("key", key.display())
            .text("region_ca", authority.file.display());
        let document = self.receipts(document, "gateway")?;
        Ok(Spec { takes_over, ..self.spec("gateway", None, 0, &self.write("gateway", document)?) })
    }
}

/// How a gateway is met: where by clients and by operators, with which key, and over TLS or not.
pub(super) struct Front<'a> {
    pub(super) listen: SocketAddr,
    pub(super) operations: SocketAddr,
    pub(super) key: &'a str,
    pub(super) certificate: Option<&'a Certificate>,
    pub(super) authority: &'a Authority,
}

/// How a spoke is met: where by gateways, through the link, and by operators; what is behind it.
pub(super) struct Door<'a> {
    pub(super) listen: SocketAddr,
    pub(super) advertise: SocketAddr,
    pub(super) operations: SocketAddr,
    pub(super) hubs: &'a [SocketAddr],
    pub(super) replicas: &'a [SocketAddr],
    /// The ports of the replicas that the spoke starts, where it does.
    pub(super) starts_at: Option<RangeInclusive<u16>>,
    pub(super) authority: &'a Authority,
}

/// Where a certificate and its key are.
pub(super) struct Certificate {
    pub(super) certificate: PathBuf,
    key: PathBuf,
}

impl Files {
    /// Makes a certificate that this machine's own names stand in, signed by itself: whoever is to believe it is shown
    /// the file.
    pub(super) fn certificate(&self) -> Result<Certificate> {
        let made = rcgen::generate_simple_self_signed(["localhost", "127.0.0.1"].map(str::to_owned))
            .context("no certificate can be made")?;
        let (certificate, key) = (self.dir.join("gateway.crt"), self.dir.join("gateway.key"));
        fs::write(&certificate, made.cert.pem())
            .with_context(|| format!("{} cannot be written", certificate.display()))?;
        write_secret(&key, &made.signing_key.serialize_pem())
            .with_context(|| format!("{} cannot be written", key.display()))?;
        Ok(Certificate { certificate, key })
    }
}

/// `hub = "http://…"`, or all of several.
fn hub_line(hubs: &[SocketAddr]) -> String {
    match hubs {
        [hub] => format!("hub = \"http://{hub}\""),
        hubs => format!("hub = {:?}", hubs.iter().map(|hub| format!("http://{hub}")).collect::<Vec<_>>()),
    }
}

/// Writes a file that only its owner can read.
pub(super) fn write_secret(file: &Path, secret: &str) -> io::Result<()> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    if file.exists() {
        fs::remove_file(file)?;
    }
    let mut open = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(file)?;
    open.write_all(secret.as_bytes())
}

/// Writes a TOML document of plain keys, for one process.
pub(crate) struct Document(String);

impl Document {
    pub(crate) fn new(about: &str) -> Document {
        Document(format!("# {about}\n# Written by `meridian up`; the next start writes it anew.\n\n"))
    }

    /// `key = "value"`, escaped.
    pub(crate) fn text(mut self, key: &str, value: impl ToString) -> Document {
        let value = toml::Value::String(value.to_string());
        writeln!(self.0, "{key} = {value}").expect("a String takes every write");
        self
    }

    /// A line as it stands.
    pub(crate) fn line(mut self, line: &str) -> Document {
        writeln!(self.0, "{line}").expect("a String takes every write");
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
    fn a_value_cannot_break_out_of_its_line() {
        let Document(text) = Document::new("a test").text("key", "a\"b\nc = 1");
        let parsed: toml::Table = text.parse().expect("valid TOML");
        assert_eq!(parsed["key"].as_str(), Some("a\"b\nc = 1"));
        assert_eq!(parsed.len(), 1);
    }
}
