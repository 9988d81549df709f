//! etcd cluster of a local fleet with `--store etcd`: three members on loopback, which require a client certificate
//! ([`super::etcd_certificates`]) of the hubs and of each other.
//!
//! They are started through this binary (`meridian with-parent etcd …`), which sets the parent-death signal and then
//! executes etcd, so that no member survives `up`, however it ends.

use super::etcd_certificates::EtcdCertificates;
use super::ports::Ports;
use super::process::{ProcessSpec, ReadinessSignal};
use anyhow::{Context, Result, bail};
use std::net::SocketAddr;
use std::path::Path;

/// Number of members; three tolerate the loss of one.
const MEMBERS: usize = 3;
/// Name of the etcd executable.
const PROGRAM: &str = "etcd";
/// Minimum keep-alive interval that the members accept from clients, and the interval of the hub. etcd's default accepts
/// one in five seconds.
const KEEP_ALIVE_MIN: &str = "400ms";
pub(super) const KEEP_ALIVE_MS: u64 = 500;

/// Prepared members of the cluster.
pub(super) struct EtcdCluster {
    pub(super) members: Vec<(ProcessSpec, SocketAddr)>,
    /// Peer addresses of the members, reserved until they are started.
    pub(super) peers: Vec<SocketAddr>,
    /// Certificates of the members and of the hubs.
    pub(super) certificates: EtcdCertificates,
}

impl EtcdCluster {
    /// Reserves the ports of all members and returns their process specifications, with data below `dir`.
    pub(super) fn prepare(dir: &Path, logs: &Path, ports: &mut Ports) -> Result<EtcdCluster> {
        if !is_installed() {
            bail!(
                "--store etcd needs the program `{PROGRAM}`, which is not in PATH; on Debian `apt-get install etcd-server` \
                 installs it (its own service is not needed), elsewhere see https://etcd.io/docs/latest/install/"
            );
        }
        let mut reserve = || -> Result<Vec<SocketAddr>> {
            (0..MEMBERS).map(|_| ports.reserve(0).context("no port is free")).collect()
        };
        let (clients, peers) = (reserve()?, reserve()?);
        let initial: Vec<_> =
            peers.iter().enumerate().map(|(index, peer)| format!("m{index}=https://{peer}")).collect();
        let address = clients.first().context("a cluster has members")?.ip();
        let certificates = EtcdCertificates::create(&dir.join("etcd-pki"), address)?;
        // etcd on other ports does not start with old data; and the state of a fleet is of no use to the next, whose
        // regions are other processes.
        let data = dir.join("etcd");
        if data.exists() {
            std::fs::remove_dir_all(&data)
                .with_context(|| format!("{} cannot be deleted", data.display()))?;
        }
        let members = clients.iter().zip(&peers).enumerate();
        let members = members.map(|(index, (client, peer))| {
            let member = format!("m{index}");
            let addresses = (*client, *peer);
            let spec = spec(logs, &data.join(&member), &member, addresses, &initial.join(","), &certificates);
            (spec, *client)
        });
        Ok(EtcdCluster { members: members.collect(), peers: peers.clone(), certificates })
    }

    /// Returns the client URLs of the members, for the hub.
    pub(super) fn endpoints(&self) -> Vec<String> {
        self.members.iter().map(|(_, client)| format!("https://{client}")).collect()
    }
}

fn spec(
    logs: &Path,
    data: &Path,
    member: &str,
    (client, peer): (SocketAddr, SocketAddr),
    initial: &str,
    EtcdCertificates { authority, member: certificate, hub: _ }: &EtcdCertificates,
) -> ProcessSpec {
    let [data, authority, certificate, key] =
        [data, authority, &certificate.certificate, &certificate.key].map(|path| path.display().to_string());
    let (client_url, peer_url) = (format!("https://{client}"), format!("https://{peer}"));
    let options = [
        ("name", member),
        ("data-dir", &data),
        ("listen-client-urls", &client_url),
        ("advertise-client-urls", &client_url),
        ("cert-file", &certificate),
        ("key-file", &key),
        ("client-cert-auth", "true"),
        ("trusted-ca-file", &authority),
        ("listen-peer-urls", &peer_url),
        ("initial-advertise-peer-urls", &peer_url),
        ("peer-cert-file", &certificate),
        ("peer-key-file", &key),
        ("peer-client-cert-auth", "true"),
        ("peer-trusted-ca-file", &authority),
        ("initial-cluster", initial),
        ("grpc-keepalive-min-time", KEEP_ALIVE_MIN),
        ("logger", "zap"),
    ];
    let options = options.map(|(name, value)| format!("--{name}={value}"));
    ProcessSpec {
        name: format!("etcd {member}"),
        arguments: ["with-parent", PROGRAM].map(str::to_owned).into_iter().chain(options).collect(),
        member: None,
        log: logs.join(format!("etcd-{member}.log")),
        ready: ReadinessSignal::Connects(client),
        takes_over: false,
    }
}

fn is_installed() -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(PROGRAM).is_file())
}
