//! Drills: a hub loses its disks, with an embedded store or with an etcd over mutual TLS, and is restored from a backup.

use super::{Fleet, Role, free_address};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const REGION: &str = "aws/eu-central-1";
/// Deployment with a residency policy.
const DEPLOYMENT: &str = "minilm-eu";
const REQUESTS: u64 = 20;
const FOLDERS_OF_A_HUB: [&str; 2] = ["pki/authority", "pki/hub"];

/// Gateway and region that write receipts of every request before they forward it.
struct ServingRegion {
    listen: String,
    gateway: Role,
    spoke: Role,
    _replica: Role,
}

/// Join tokens of the processes, which are used once.
struct UsedTokens([String; 3]);

impl UsedTokens {
    const ROLES: [&str; 3] = ["replica", "spoke", "gateway"];

    fn create(fleet: &Fleet) -> UsedTokens {
        UsedTokens(UsedTokens::ROLES.map(|role| token(fleet, role)))
    }
}

fn token(fleet: &Fleet, role: &str) -> String {
    fleet.text(&["pki", "token", "--role", role, "--region", REGION, "--ttl", "10m"]).trim().to_owned()
}

/// Adds the deployments of `configs/` to the configuration of the hub.
fn add_deployments(fleet: &Fleet) {
    let deployments = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/deployments.toml");
    let hub = fleet.read("hub.toml");
    std::fs::write(fleet.dir.join("hub.toml"), format!("deployments = {deployments:?}\n{hub}")).unwrap();
}

/// Applies a tenant, and returns a key that the hub has created for it.
fn create_key(fleet: &Fleet) -> String {
    std::fs::write(fleet.dir.join("applied.toml"), "[[tenant]]\nname = \"acme\"\n").unwrap();
    let hub = format!("https://{}", fleet.hub);
    fleet.text(&["apply", "applied.toml", "--yes", "--hub", &hub]);
    new_key(fleet)
}

fn new_key(fleet: &Fleet) -> String {
    let hub = format!("https://{}", fleet.hub);
    fleet.text(&["key", "create", "--tenant", "acme", "--hub", &hub]).trim().to_owned()
}

impl ServingRegion {
    /// Writes the configuration of the processes, which is the same at each start.
    fn configure(fleet: &Fleet) {
        let [replica, spoke, gateway, operations, of_replica] = [(); 5].map(|()| free_address());
        let hub = &fleet.hub;
        let write = |file: &str, text: String| std::fs::write(fleet.dir.join(file), text).unwrap();
        let receipts = |name: &str| {
            format!("[receipts]\ndir = \"receipts/{name}\"\nkey_file = \"receipts-key\"\nrequired = true\n")
        };
        write("receipts-key", "0123456789abcdef".to_owned());
        write("replica.toml", "[identity]\ndir = \"replica\"\n".to_owned());
        write(
            "spoke.toml",
            format!(
                "region = \"{REGION}\"\nlisten = \"{spoke}\"\nadvertise = \"{spoke}\"\nhub = \"https://{hub}\"\n\
                 [identity]\ndir = \"spoke\"\n{}[[replica]]\nendpoint = \"{replica}\"\n",
                receipts("spoke")
            ),
        );
        write(
            "gateway.toml",
            format!(
                "listen = \"{gateway}\"\noperations = \"{operations}\"\nregion = \"{REGION}\"\nhub = \"https://{hub}\"\n\
                 snapshot = \"routes\"\n[timeouts]\nlame_duck = \"0s\"\n[identity]\ndir = \"gateway\"\n{}",
                receipts("gateway")
            ),
        );
        write("addresses", [replica, gateway, of_replica].join(" "));
    }

    /// Starts the processes. Without tokens they use the certificates in their folders.
    fn start(fleet: &Fleet, tokens: Option<&UsedTokens>) -> ServingRegion {
        let addresses = fleet.read("addresses");
        let addresses: Vec<&str> = addresses.split(' ').collect();
        let [replica, gateway, operations] = addresses[..] else { panic!("{addresses:?}") };
        let join = |at: usize| tokens.map(|tokens| ["--join", &tokens.0[at]]).into_iter().flatten();
        let scripted = ["scripted-replica", "--listen", replica, "--operations", operations];
        let scripted = scripted.into_iter().chain(["--inputs-per-second", "1000", "--name", DEPLOYMENT]);
        let scripted: Vec<_> = scripted.chain(["--config", "replica.toml"]).chain(join(0)).collect();
        let role = |role: &'static str, file: &'static str, at: usize| -> Role {
            fleet.start(&[role, "--config", file].into_iter().chain(join(at)).collect::<Vec<_>>())
        };
        ServingRegion {
            listen: gateway.to_owned(),
            _replica: fleet.start(&scripted),
            spoke: role("spoke", "spoke.toml", 1),
            gateway: role("gateway", "gateway.toml", 2),
        }
    }

    /// Sends a request; returns its status and the region that has served it.
    fn send(&self, key: &str) -> (u16, String) {
        let body = json!({"model": DEPLOYMENT, "input": "a text"}).to_string();
        let request = format!(
            "POST /v1/embeddings HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {key}\r\ncontent-length: {}\r\n\
             content-type: application/json\r\nconnection: close\r\n\r\n{body}",
            body.len()
        );
        let mut stream = TcpStream::connect(&self.listen).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let mut response = Vec::new();
        stream.write_all(request.as_bytes()).unwrap();
        stream.read_to_end(&mut response).unwrap();
        let response = String::from_utf8_lossy(&response);
        let status = response.split(' ').nth(1).and_then(|text| text.parse().ok()).unwrap_or_default();
        let region = response.lines().find_map(|line| line.strip_prefix("x-meridian-region: "));
        (status, region.unwrap_or_default().to_owned())
    }

    /// Waits until the region serves a client with this key, and sends further requests; returns the number of all that
    /// were served.
    fn serve(&self, fleet: &Fleet, key: &str) -> u64 {
        let served = || self.send(key) == (200, REGION.to_owned());
        fleet.wait_until("the region serves", served);
        for number in 1..REQUESTS {
            assert!(served(), "request {number}");
        }
        REQUESTS
    }

    /// Stops the gateway, then the spoke, so that both close their chains.
    fn stop(mut self) {
        for role in [&mut self.gateway, &mut self.spoke] {
            kill_process(Pid::from_child(&role.0), Signal::TERM).unwrap();
            assert!(role.0.wait().unwrap().success());
        }
    }
}

/// Audits the receipts against the signed checkpoint of the audit before; asserts that all of this number were confirmed.
fn audit(fleet: &Fleet, requests: u64, more: &[&str]) {
    let arguments = ["verify-residency", "--json", "--receipts", "receipts/gateway", "receipts/spoke"];
    let checkpoint = ["--checkpoint", "chains.checkpoint", "--checkpoint-key-file", "auditor-key"];
    let report = fleet.json(&[&arguments[..], &checkpoint, more].concat());
    assert_eq!(report["holds"], true, "{report:#}");
    assert_eq!((&report["confirmed"], &report["missing"]), (&json!(requests), &json!(0)), "{report:#}");
}

fn lose(fleet: &Fleet, folders: &[&str]) {
    for folder in folders {
        std::fs::remove_dir_all(fleet.dir.join(folder)).unwrap();
    }
}

/// Asserts that a token cannot be used by another process.
fn assert_not_accepted(fleet: &Fleet, token: &str) {
    let thief = fleet.read("gateway.toml").replace("dir = \"gateway\"", "dir = \"thief\"");
    std::fs::write(fleet.dir.join("thief.toml"), thief).unwrap();
    let problem = fleet.problem(&["gateway", "--config", "thief.toml", "--join", token]);
    assert!(problem.contains("token"), "{problem}");
    assert!(!fleet.dir.join("thief/certificate.pem").exists(), "{problem}");
}

#[test]
fn a_hub_loses_its_disk_and_is_restored_from_an_encrypted_backup_with_receipts_tokens_and_keys() {
    let dir = tempfile::tempdir().unwrap();
    let fleet = Fleet::new(dir.path());
    add_deployments(&fleet);
    let hub = fleet.start(&["hub", "--config", "hub.toml"]);
    fleet.ready();
    fleet.text(&["pki", "issue", "--role", "viewer", "--name", "bob", "--out", "bob"]);
    let key = create_key(&fleet);
    let tokens = UsedTokens::create(&fleet);
    let unused = token(&fleet, "gateway");
    ServingRegion::configure(&fleet);
    let region = ServingRegion::start(&fleet, Some(&tokens));
    let mut requests = region.serve(&fleet, &key);
    assert_eq!(region.send("another-key").0, 401);
    region.stop();
    std::fs::write(fleet.dir.join("auditor-key"), "0123456789abcdef").unwrap();
    audit(&fleet, requests, &["--init-checkpoint"]);

    std::fs::write(fleet.dir.join("phrase"), "correct horse battery staple\n").unwrap();
    let common = ["--config", "hub.toml", "--receipts", "receipts", "--passphrase-file", "phrase", "--json"];
    let with = |first: &[&'static str]| [first, &common].concat();
    let backup = fleet.json(&with(&["backup", "hub.backup"]));
    assert_eq!(backup["encrypted"], true);
    drop(hub);
    lose(&fleet, &[&FOLDERS_OF_A_HUB[..], &["data", "receipts"]].concat());
    let problem = fleet.problem(&["restore", "hub.backup", "--config", "hub.toml"]);
    assert!(problem.contains("encrypted"), "{problem}");
    assert!(!fleet.dir.join("data/hub.redb").exists());
    let restored = fleet.json(&with(&["restore", "hub.backup"]));
    assert!(restored["epoch"].as_u64().unwrap() > 1_700_000_000);
    let again = fleet.problem(&with(&["restore", "hub.backup"]));
    assert!(again.contains("not empty"), "{again}");
    audit(&fleet, requests, &[]);

    let _hub = fleet.start(&["hub", "--config", "hub.toml"]);
    fleet.ready();
    let listed = fleet.text(&["pki", "list", "--identity", "bob"]);
    assert!(listed.contains("viewer/bob"), "{listed}");
    fleet.text(&["pki", "issue", "--role", "viewer", "--name", "eve", "--out", "eve"]);
    for token in tokens.0.iter().chain([&unused]) {
        assert_not_accepted(&fleet, token);
    }
    // The processes continue with their certificates, the key with its tenant, and the chains where they were closed.
    let region = ServingRegion::start(&fleet, None);
    requests += region.serve(&fleet, &key);
    assert_eq!(region.send("another-key").0, 401);
    region.stop();
    audit(&fleet, requests, &[]);
}

/// One member of etcd, which requires certificates of its own authority from clients.
struct EtcdMember {
    process: Child,
}

impl Drop for EtcdMember {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

/// Addresses of the member.
struct EtcdAddresses {
    client: String,
    peer: String,
}

impl EtcdAddresses {
    /// Writes the certificates of the member and of the hub, and replaces the store in the configuration of the hub.
    fn configure(fleet: &Fleet) -> EtcdAddresses {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate().unwrap();
        std::fs::write(fleet.dir.join("etcd-ca.crt"), params.self_signed(&key).unwrap().pem()).unwrap();
        let issuer = Issuer::new(params, key);
        for (name, subjects) in [("etcd", vec!["127.0.0.1".to_owned()]), ("etcd-hub", Vec::new())] {
            let key = KeyPair::generate().unwrap();
            let made = CertificateParams::new(subjects).unwrap().signed_by(&key, &issuer).unwrap();
            std::fs::write(fleet.dir.join(format!("{name}.crt")), made.pem()).unwrap();
            std::fs::write(fleet.dir.join(format!("{name}.key")), key.serialize_pem()).unwrap();
        }
        let addresses = EtcdAddresses { client: free_address(), peer: free_address() };
        let store = format!(
            "[store]\nkind = \"etcd\"\nendpoints = [\"https://{}\"]\nca = \"etcd-ca.crt\"\n\
             certificate = \"etcd-hub.crt\"\nkey = \"etcd-hub.key\"\n",
            addresses.client
        );
        let hub = fleet.read("hub.toml").replace("data = \"data\"\n", "");
        std::fs::write(fleet.dir.join("hub.toml"), hub + &store).unwrap();
        addresses
    }

    fn start(&self, fleet: &Fleet) -> EtcdMember {
        let EtcdAddresses { client, peer } = self;
        let (client, peer) = (format!("https://{client}"), format!("http://{peer}"));
        let cluster = format!("m={peer}");
        let options = [
            ("name", "m"),
            ("data-dir", "etcd-data"),
            ("listen-client-urls", &client),
            ("advertise-client-urls", &client),
            ("listen-peer-urls", &peer),
            ("initial-advertise-peer-urls", &peer),
            ("initial-cluster", &cluster),
            ("cert-file", "etcd.crt"),
            ("key-file", "etcd.key"),
            ("client-cert-auth", "true"),
            ("trusted-ca-file", "etcd-ca.crt"),
            ("logger", "zap"),
            ("log-level", "error"),
        ];
        let mut command = Command::new("etcd");
        command.args(options.map(|(name, value)| format!("--{name}={value}")));
        command.current_dir(&fleet.dir).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let missing = "etcd cannot be started; on Debian `apt-get install etcd-server` installs it";
        EtcdMember { process: command.spawn().expect(missing) }
    }
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let (from, to) = (entry.as_ref().unwrap().path(), to.join(entry.unwrap().file_name()));
        if from.is_dir() {
            copy(&from, &to);
        } else {
            std::fs::copy(from, to).unwrap();
        }
    }
}

#[test]
fn a_hub_on_etcd_loses_all_disks_and_its_folders_are_restored_beside_a_copy_of_etcd() {
    let dir = tempfile::tempdir().unwrap();
    let fleet = Fleet::new(dir.path());
    add_deployments(&fleet);
    let addresses = EtcdAddresses::configure(&fleet);
    let etcd = addresses.start(&fleet);
    let hub = fleet.start(&["hub", "--config", "hub.toml"]);
    fleet.ready();
    let key = create_key(&fleet);
    let tokens = UsedTokens::create(&fleet);
    let unused = token(&fleet, "replica");
    ServingRegion::configure(&fleet);
    let region = ServingRegion::start(&fleet, Some(&tokens));
    region.serve(&fleet, &key);
    std::fs::write(fleet.dir.join("phrase"), "correct horse battery staple\n").unwrap();
    let common = ["--config", "hub.toml", "--passphrase-file", "phrase", "--json"];
    let backup = fleet.json(&[&["backup", "hub.backup"], &common[..]].concat());
    assert_eq!((&backup["encrypted"], &backup["entries"]), (&json!(true), &Value::Null));
    // The copy of a stopped member has what `etcdctl snapshot save` writes.
    drop(etcd);
    copy(&fleet.dir.join("etcd-data"), &fleet.dir.join("etcd-copy"));
    let etcd = addresses.start(&fleet);
    // After the copy: a token is used, which the copy has as unused.
    fleet.ready();
    std::fs::write(fleet.dir.join("late.toml"), "[identity]\ndir = \"late\"\n").unwrap();
    let [listen, operations] = [(); 2].map(|()| free_address());
    let late = ["scripted-replica", "--listen", &listen, "--operations", &operations, "--name", DEPLOYMENT];
    let late =
        [&late[..], &["--inputs-per-second", "1", "--config", "late.toml", "--join", &unused]].concat();
    drop(fleet.start(&late));
    // And tables are published, which the running gateway has and the copy has not.
    let [_, _, lost_key] = [(); 3].map(|()| new_key(&fleet));
    fleet.wait_until("the gateway has the last table", || region.send(&lost_key).0 == 200);

    drop((hub, etcd));
    lose(&fleet, &[&FOLDERS_OF_A_HUB[..], &["etcd-data"]].concat());
    let problem = fleet.problem(&["restore", "hub.backup", "--config", "hub.toml"]);
    assert!(problem.contains("encrypted"), "{problem}");
    let restored = fleet.json(&[&["restore", "hub.backup"], &common[..]].concat());
    assert_eq!(restored["epoch"], Value::Null, "the store is restored with the tools of etcd");
    copy(&fleet.dir.join("etcd-copy"), &fleet.dir.join("etcd-data"));
    let _etcd = addresses.start(&fleet);
    let _hub = fleet.start(&["hub", "--config", "hub.toml"]);
    fleet.ready();
    for token in tokens.0.iter().chain([&unused]) {
        assert_not_accepted(&fleet, token);
    }
    // The running processes continue, and restarted ones with their certificates.
    region.serve(&fleet, &key);
    let after = new_key(&fleet);
    fleet.wait_until("the running gateway accepts the tables of the restored store", || {
        region.send(&after).0 == 200
    });
    fleet.wait_until("the lost key is one no more", || region.send(&lost_key).0 == 401);
    region.stop();
    let region = ServingRegion::start(&fleet, None);
    region.serve(&fleet, &key);
    region.stop();
}
