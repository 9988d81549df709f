//! An etcd cluster for tests: child processes on free ports, with data in a temporary folder.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use etcd_client::Client;
use rustix::process::{Pid, Signal, kill_process};
use scheduler_store::{EtcdConfig, EtcdStore, Store};
use tokio::sync::{Mutex, MutexGuard};

use super::wait_until;

/// Only one cluster runs at a time: three members are enough load for a small machine.
static ONE_AT_A_TIME: Mutex<()> = Mutex::const_new(());
/// Keep-alive interval that the members accept, and the one in use: a connection that hangs is detected within a
/// second.
const KEEP_ALIVE_MIN: &str = "400ms";
pub(crate) const KEEP_ALIVE: Duration = Duration::from_millis(500);

pub(crate) struct Cluster {
    /// Scheme of the members' client URLs.
    scheme: &'static str,
    /// Further arguments of each member.
    extra_args: Vec<String>,
    members: Vec<Member>,
    dir: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
}

struct Member {
    client: u16,
    peer: u16,
    process: Option<Child>,
}

impl Cluster {
    /// Starts a cluster and waits until it is writable.
    pub(crate) async fn start(members: usize) -> Cluster {
        let turn = ONE_AT_A_TIME.lock().await;
        let ports = free_ports(2 * members);
        let member = |ports: &[u16]| Member { client: ports[0], peer: ports[1], process: None };
        let members = ports.chunks(2).map(member).collect();
        let (scheme, extra_args) = ("http", Vec::new());
        let mut cluster =
            Cluster { scheme, extra_args, members, dir: tempfile::tempdir().unwrap(), _turn: turn };
        cluster.start_all();
        cluster.wait_until_writable().await;
        cluster
    }

    /// Starts one member with TLS, configured by these arguments. The caller waits for it, since that needs the
    /// certificates.
    pub(crate) async fn start_over_tls(extra_args: Vec<String>) -> Cluster {
        let turn = ONE_AT_A_TIME.lock().await;
        let ports = free_ports(2);
        let members = vec![Member { client: ports[0], peer: ports[1], process: None }];
        let dir = tempfile::tempdir().unwrap();
        let mut cluster = Cluster { scheme: "https", extra_args, members, dir, _turn: turn };
        cluster.start_all();
        cluster
    }

    pub(crate) fn endpoint(&self, member: usize) -> String {
        format!("{}://127.0.0.1:{}", self.scheme, self.members[member].client)
    }

    /// Returns a store that uses the members in order, starting with `first`.
    pub(crate) fn store(&self, prefix: &str, first: usize) -> EtcdStore {
        let members = self.members.len();
        let endpoints = (first..first + members).map(|member| self.endpoint(member % members));
        store_at(endpoints.collect(), prefix)
    }

    /// Returns the index of the leader.
    pub(crate) async fn leader(&self) -> usize {
        for member in 0..self.members.len() {
            let client = Client::connect([self.endpoint(member)], None).await.unwrap();
            let status = client.maintenance_client().status().await.unwrap();
            if status.leader() == status.header().unwrap().member_id() {
                return member;
            }
        }
        panic!("there is no leader")
    }

    /// Kills a member.
    pub(crate) fn kill(&mut self, member: usize) {
        if let Some(mut process) = self.members[member].process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    pub(crate) fn kill_all(&mut self) {
        (0..self.members.len()).for_each(|member| self.kill(member));
    }

    /// Sends a signal to a member, to suspend or resume it.
    pub(crate) fn signal(&self, member: usize, signal: Signal) {
        let process = self.members[member].process.as_ref().unwrap();
        kill_process(Pid::from_child(process), signal).unwrap();
    }

    pub(crate) fn start_all(&mut self) {
        (0..self.members.len()).for_each(|member| self.start_member(member));
    }

    /// Restarts a killed member with its data.
    pub(crate) fn start_member(&mut self, member: usize) {
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        let peers: Vec<_> = self.members.iter().map(|member| url(member.peer)).collect();
        let initial: Vec<_> =
            peers.iter().enumerate().map(|(member, peer)| format!("m{member}={peer}")).collect();
        let Member { peer, .. } = self.members[member];
        let client = self.endpoint(member);
        let log = std::fs::File::create(self.dir.path().join(format!("m{member}.log"))).unwrap();
        let process = Command::new("etcd")
            .args(["--name", &format!("m{member}"), "--data-dir"])
            .arg(self.data(member))
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &url(peer), "--initial-advertise-peer-urls", &url(peer)])
            .args(["--initial-cluster", &initial.join(","), "--logger", "zap", "--log-level", "warn"])
            .args(["--grpc-keepalive-min-time", KEEP_ALIVE_MIN])
            .args(&self.extra_args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        let missing = "etcd cannot be started; on Debian `apt-get install etcd-server` installs it";
        self.members[member].process = Some(process.expect(missing));
    }

    /// Waits until a write would succeed, with a linearisable read, which needs a leader and a quorum as a write does.
    /// A write that timed out could still be executed later, and change a revision that a test counts.
    pub(crate) async fn wait_until_writable(&self) {
        let store = self.store("up/", 0);
        wait_until("etcd takes writes", async || store.get("up").await.is_ok()).await;
    }

    /// Returns the data folder of a member.
    pub(crate) fn data(&self, member: usize) -> PathBuf {
        self.dir.path().join(format!("m{member}"))
    }

    /// Copies the data of all members, which must not be running.
    pub(crate) fn back_up(&self, to: &Path) {
        (0..self.members.len()).for_each(|member| copy(&self.data(member), &to.join(format!("m{member}"))));
    }

    /// Restores the copied data of all members, which must not be running.
    pub(crate) fn restore(&self, from: &Path) {
        for member in 0..self.members.len() {
            std::fs::remove_dir_all(self.data(member)).unwrap();
            copy(&from.join(format!("m{member}")), &self.data(member));
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.kill_all();
    }
}

pub(crate) fn store_at(endpoints: Vec<String>, prefix: &str) -> EtcdStore {
    let prefix = prefix.to_owned();
    EtcdStore::new(EtcdConfig { endpoints, prefix, keep_alive: KEEP_ALIVE, user: None, tls: None })
}

/// Returns free ports, all bound at the same time while they are chosen.
fn free_ports(count: usize) -> Vec<u16> {
    let held: Vec<_> = (0..count).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    held.iter().map(|listener| listener.local_addr().unwrap().port()).collect()
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for item in std::fs::read_dir(from).unwrap() {
        let (from, name) = (item.as_ref().unwrap().path(), item.unwrap().file_name());
        if from.is_dir() {
            copy(&from, &to.join(name));
        } else {
            std::fs::copy(&from, to.join(name)).unwrap();
        }
    }
}
