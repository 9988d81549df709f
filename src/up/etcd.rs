//! The etcd of a world that asks for one (`--store etcd`): three members, as anybody would run them, on loopback.
//!
//! They are started through this binary (`meridian with-parent etcd …`), which asks the kernel to be ended with `up` and
//! then becomes etcd; so nothing is left behind, however `up` ends.

use super::files::Files;
use super::ports::Ports;
use super::process::{Ready, Spec};
use anyhow::{Context, Result, bail};
use std::net::SocketAddr;
use std::path::Path;

/// Of which one may be lost, which is what one has an etcd for.
const MEMBERS: usize = 3;
/// What etcd is called.
const PROGRAM: &str = "etcd";
/// Signs of life that the members take from their clients, and in which period the hub sends them. etcd takes one in five
/// seconds unless it is told otherwise.
const KEEP_ALIVE_MIN: &str = "400ms";
pub(super) const KEEP_ALIVE_MS: u64 = 500;

/// The members, prepared.
pub(super) struct Etcd {
    pub(super) members: Vec<(Spec, SocketAddr)>,
    /// Where members listen for each other, reserved until they are started.
    pub(super) peers: Vec<SocketAddr>,
}

impl Etcd {
    /// Reserves the ports of all members and says how each is started.
    pub(super) fn prepare(files: &Files, ports: &mut Ports) -> Result<Etcd> {
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
            peers.iter().enumerate().map(|(at, peer)| format!("m{at}=http://{peer}")).collect();
        // An etcd that was moved to other ports does not start on its old data; and a world's state is of no use to the
        // next, whose regions are other processes.
        let data = files.dir.join("etcd");
        if data.exists() {
            std::fs::remove_dir_all(&data)
                .with_context(|| format!("{} cannot be emptied", data.display()))?;
        }
        let members = clients.iter().zip(&peers).enumerate();
        let members = members.map(|(at, (client, peer))| {
            let member = format!("m{at}");
            let spec = spec(files, &data.join(&member), &member, *client, *peer, &initial.join(","));
            (spec, *client)
        });
        Ok(Etcd { members: members.collect(), peers: peers.clone() })
    }

    /// `["http://…", …]`, for the hub.
    pub(super) fn endpoints(&self) -> Vec<String> {
        self.members.iter().map(|(_, client)| format!("http://{client}")).collect()
    }
}

fn spec(
    files: &Files,
    data: &Path,
    member: &str,
    client: SocketAddr,
    peer: SocketAddr,
    initial: &str,
) -> Spec {
    let data = data.display().to_string();
    let (client_url, peer_url) = (format!("http://{client}"), format!("http://{peer}"));
    let arguments = [
        "with-parent",
        PROGRAM,
        "--name",
        member,
        "--data-dir",
        &data,
        "--listen-client-urls",
        &client_url,
        "--advertise-client-urls",
        &client_url,
        "--listen-peer-urls",
        &peer_url,
        "--initial-advertise-peer-urls",
        &peer_url,
        "--initial-cluster",
        initial,
        "--grpc-keepalive-min-time",
        KEEP_ALIVE_MIN,
        "--logger",
        "zap",
    ];
    Spec {
        name: format!("etcd {member}"),
        arguments: arguments.map(str::to_owned).to_vec(),
        log: files.logs().join(format!("etcd-{member}.log")),
        ready: Ready::Answers(client),
        takes_over: false,
    }
}

fn is_installed() -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(PROGRAM).is_file())
}
