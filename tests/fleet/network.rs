//! Machines of a fleet: network namespaces, each with one address, a name, and a bridge to the others.
//!
//! The bridge is in a namespace of its own, and no namespace has a route to another network. So nothing leaves the machine,
//! several fleets can use the same addresses, and a firewall of the machine has no effect. The DNS server is a thread of this
//! process in a namespace of its own; the `resolv.conf` of every machine names it (`/etc/netns`, ip-netns(8)).
//!
//! Everything is removed when [`Network`] is dropped. The namespaces of a process that was killed are removed by the next
//! fleet.

use crate::dns_server::{DnsServer, Zone};
use crate::haproxy;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread::JoinHandle;
use tokio::sync::oneshot;

/// Domain of the names.
const DOMAIN: &str = "fleet.test";
/// First two bytes of the addresses.
const SUBNET: [u8; 2] = [10, 77];
/// Machine with the bridge.
const SWITCH: &str = "switch";
/// Machine with the DNS server.
const DNS: &str = "dns";
/// TTL of the records in seconds.
const TTL_S: u32 = 5;
/// Start of the names of namespaces, followed by the process id of the fleet and the machine.
const PREFIX: &str = "mer";

/// Namespaces of a fleet.
pub(crate) struct Network {
    machines: BTreeMap<String, Ipv4Addr>,
    dns: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
}

/// Returns the name of a machine in DNS.
pub(crate) fn host(machine: &str) -> String {
    format!("{machine}.{DOMAIN}")
}

/// Returns the name of a machine's namespace.
pub(crate) fn namespace(machine: &str) -> String {
    format!("{PREFIX}-{}-{machine}", std::process::id())
}

impl Network {
    /// Creates the machines with their names.
    ///
    /// # Errors
    ///
    /// Reason why this machine cannot create namespaces: no permission, or no program `ip`.
    pub(crate) fn create(machines: &[String]) -> Result<Network, String> {
        remove_leftovers();
        let machines = [SWITCH, DNS].into_iter().chain(machines.iter().map(String::as_str));
        let address = |index: usize| Ipv4Addr::from([SUBNET[0], SUBNET[1], 0, 1 + index as u8]);
        let machines =
            machines.enumerate().map(|(index, machine)| (machine.to_owned(), address(index))).collect();
        // Removed when it is dropped, also after a failure below.
        let mut network = Network { machines, dns: None };
        network.add(SWITCH)?;
        let configure = |machine: &str, commands: &str| {
            ip(&["-n", &namespace(machine), "-batch", "-"], commands).unwrap();
        };
        configure(SWITCH, "link add br0 type bridge\nlink set br0 up\n");
        for (index, (machine, address)) in network.machines.iter().enumerate() {
            if machine != SWITCH {
                network.add(machine).unwrap();
                let port = format!(
                    "link add p{index} type veth peer name eth0 netns {}\nlink set p{index} master br0 up\n",
                    namespace(machine)
                );
                configure(SWITCH, &port);
                let own = format!("link set lo up\naddress add {address}/24 dev eth0\nlink set eth0 up\n");
                configure(machine, &own);
            }
        }
        network.dns = Some(network.start_dns());
        Ok(network)
    }

    /// Adds a namespace whose names the DNS server resolves.
    fn add(&self, machine: &str) -> Result<(), String> {
        let name = namespace(machine);
        ip(&["netns", "add", &name], "")?;
        let folder = etc(&name);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("resolv.conf"), format!("nameserver {}\n", self.address(DNS))).unwrap();
        Ok(())
    }

    /// Starts the DNS server on a thread in its namespace.
    fn start_dns(&self) -> (oneshot::Sender<()>, JoinHandle<()>) {
        let (stop, stopped) = oneshot::channel();
        let (ready, started) = mpsc::channel();
        let listen = SocketAddr::from((self.address(DNS), 53));
        let names = self.machines.clone();
        let thread = std::thread::spawn(move || {
            enter(DNS);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let server = DnsServer::start_at(listen).await;
                for (machine, address) in names {
                    server.set(&host(&machine), Zone::Addresses(vec![address.into()], TTL_S));
                }
                ready.send(()).unwrap();
                stopped.await.ok();
            });
        });
        started.recv().expect("the DNS server starts");
        (stop, thread)
    }

    /// Returns the address of a machine.
    pub(crate) fn address(&self, machine: &str) -> Ipv4Addr {
        *self.machines.get(machine).unwrap_or_else(|| panic!("no machine {machine}"))
    }
}

/// Returns a command that runs a program on a machine. Its process id is that of the program.
pub(crate) fn command(machine: &str, program: &Path) -> Command {
    let mut command = Command::new("ip");
    command.args(["netns", "exec", &namespace(machine)]).arg(program).env("PATH", haproxy::path());
    command
}

/// Moves the calling thread to a machine: its future sockets use the network of that machine.
pub(crate) fn enter(machine: &str) {
    let file = File::open(Path::new("/run/netns").join(namespace(machine))).expect("the namespace exists");
    move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).expect("the user is root");
}

impl Drop for Network {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.dns.take() {
            stop.send(()).ok();
            thread.join().ok();
        }
        self.machines.keys().for_each(|machine| remove(&namespace(machine)));
    }
}

/// Runs `ip` with commands on its standard input.
fn ip(arguments: &[&str], input: &str) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("`ip` cannot be run: {error}; install iproute2");
    let mut command = Command::new("ip");
    command.args(arguments).env("PATH", haproxy::path());
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut process = command.spawn().map_err(failed)?;
    process.stdin.take().expect("piped").write_all(input.as_bytes()).ok();
    let output = process.wait_with_output().map_err(failed)?;
    let problem = String::from_utf8_lossy(&output.stderr);
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("`ip {}` failed: {}", arguments.join(" "), problem.trim())),
    }
}

/// Returns the folder of a namespace's own files of `/etc`.
fn etc(namespace: &str) -> PathBuf {
    Path::new("/etc/netns").join(namespace)
}

fn remove(namespace: &str) {
    // A part of a failed creation may be missing.
    ip(&["netns", "delete", namespace], "").ok();
    fs::remove_dir_all(etc(namespace)).ok();
    // Fails if other namespaces have files.
    fs::remove_dir("/etc/netns").ok();
}

/// Removes the namespaces of fleets whose process was killed.
fn remove_leftovers() {
    for entry in fs::read_dir("/run/netns").into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let owner = name.strip_prefix(PREFIX).and_then(|rest| rest.strip_prefix('-')?.split('-').next());
        let owner = owner.and_then(|id| id.parse::<u32>().ok());
        if owner.is_some_and(|id| !Path::new("/proc").join(id.to_string()).exists()) {
            remove(&name);
        }
    }
}
