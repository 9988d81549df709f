//! An etcd of some members: processes of the test, on ports that were free, with data that goes with the test.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use etcd_client::Client;
use rustix::process::{Pid, Signal, kill_process};
use scheduler_store::{Etcd, EtcdConfig, Store};
use tokio::sync::{Mutex, MutexGuard};

use super::until;

/// One etcd at a time: three members on a small machine are enough work for it.
static ONE_AT_A_TIME: Mutex<()> = Mutex::const_new(());
/// Signs of life that the members take, and what is sent: so that a connection that hangs is found in a second.
const KEEP_ALIVE_MIN: &str = "400ms";
pub(crate) const KEEP_ALIVE: Duration = Duration::from_millis(500);

pub(crate) struct Cluster {
    /// Of the members' doors for clients.
    scheme: &'static str,
    /// What each member is told beside the usual.
    further: Vec<String>,
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
    /// Starts an etcd and waits until it can be written.
    pub(crate) async fn start(members: usize) -> Cluster {
        let turn = ONE_AT_A_TIME.lock().await;
        let ports = free_ports(2 * members);
        let member = |ports: &[u16]| Member { client: ports[0], peer: ports[1], process: None };
        let members = ports.chunks(2).map(member).collect();
        let (scheme, further) = ("http", Vec::new());
        let mut cluster =
            Cluster { scheme, further, members, dir: tempfile::tempdir().unwrap(), _turn: turn };
        cluster.start_all();
        cluster.until_writable().await;
        cluster
    }

    /// Starts one member that speaks TLS, and is told of it by these arguments. Who waits for it needs the certificates.
    pub(crate) async fn start_over_tls(further: Vec<String>) -> Cluster {
        let turn = ONE_AT_A_TIME.lock().await;
        let ports = free_ports(2);
        let members = vec![Member { client: ports[0], peer: ports[1], process: None }];
        let dir = tempfile::tempdir().unwrap();
        let mut cluster = Cluster { scheme: "https", further, members, dir, _turn: turn };
        cluster.start_all();
        cluster
    }

    pub(crate) fn endpoint(&self, member: usize) -> String {
        format!("{}://127.0.0.1:{}", self.scheme, self.members[member].client)
    }

    /// A store in it, which asks the members in the order of their numbers, beginning with `first`.
    pub(crate) fn store(&self, prefix: &str, first: usize) -> Etcd {
        let members = self.members.len();
        let endpoints = (first..first + members).map(|member| self.endpoint(member % members));
        store_at(endpoints.collect(), prefix)
    }

    /// Which member leads the others.
    pub(crate) async fn leader(&self) -> usize {
        for member in 0..self.members.len() {
            let client = Client::connect([self.endpoint(member)], None).await.unwrap();
            let status = client.maintenance_client().status().await.unwrap();
            if status.leader() == status.header().unwrap().member_id() {
                return member;
            }
        }
        panic!("nobody leads")
    }

    /// Ends a member where it stands.
    pub(crate) fn kill(&mut self, member: usize) {
        if let Some(mut process) = self.members[member].process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    pub(crate) fn kill_all(&mut self) {
        (0..self.members.len()).for_each(|member| self.kill(member));
    }

    /// Stops a member in the middle of whatever it does, or lets it go on.
    pub(crate) fn signal(&self, member: usize, signal: Signal) {
        let process = self.members[member].process.as_ref().unwrap();
        kill_process(Pid::from_child(process), signal).unwrap();
    }

    pub(crate) fn start_all(&mut self) {
        (0..self.members.len()).for_each(|member| self.start_member(member));
    }

    /// Starts a member that was killed, with the data that it had.
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
            .args(&self.further)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        let missing = "etcd cannot be started; on Debian `apt-get install etcd-server` installs it";
        self.members[member].process = Some(process.expect(missing));
    }

    /// Waits until a write would succeed: a linearisable read needs a leader with most of the members behind it, as a write
    /// does. A write that was given up may be done all the same, later, and change a revision that a test counts.
    pub(crate) async fn until_writable(&self) {
        let store = self.store("up/", 0);
        until("etcd takes writes", async || store.get("up").await.is_ok()).await;
    }

    /// Where a member keeps its data.
    pub(crate) fn data(&self, member: usize) -> PathBuf {
        self.dir.path().join(format!("m{member}"))
    }

    /// Copies what all members have on disk; they must not run.
    pub(crate) fn back_up(&self, to: &Path) {
        (0..self.members.len()).for_each(|member| copy(&self.data(member), &to.join(format!("m{member}"))));
    }

    /// Puts back what was copied; they must not run.
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

pub(crate) fn store_at(endpoints: Vec<String>, prefix: &str) -> Etcd {
    let prefix = prefix.to_owned();
    Etcd::new(EtcdConfig { endpoints, prefix, keep_alive: KEEP_ALIVE, user: None, tls: None })
}

/// Ports that nobody listens on now, chosen while all of them are held.
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
