//! Files of a fleet: the configuration of every process, as an operator would write it, and the certificates of etcd.

use crate::haproxy;
use crate::network::{Network, host};
use crate::process::ProcessSpec;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use std::fs;
use std::path::{Path, PathBuf};

/// API key of clients.
pub(crate) const KEY: &str = "local";
/// Regions of the fleet: three clouds, and two jurisdictions, the USA and the EU.
pub(crate) const REGIONS: [&str; 3] = ["aws/us-east-1", "gcp/europe-west4", "azure/germanywestcentral"];
/// Nearest region of each gateway.
pub(crate) const GATEWAY_REGIONS: [&str; 2] = ["aws/us-east-1", "gcp/europe-west4"];
pub(crate) const MEMBERS: usize = 3;
pub(crate) const HUBS: usize = 2;
/// In each region.
pub(crate) const SPOKES: usize = 2;
/// In each region.
pub(crate) const REPLICAS: usize = 2;
/// Throughput of a replica in inputs per second: two replicas suffice for twice the load of the test.
const INPUTS_PER_SECOND: u32 = 200;

/// Ports, the same on every machine.
pub(crate) mod port {
    pub(crate) const ETCD_CLIENT: u16 = 2379;
    pub(crate) const ETCD_PEER: u16 = 2380;
    pub(crate) const ETCD_OPERATIONS: u16 = 2381;
    pub(crate) const HUB: u16 = 7000;
    pub(crate) const AUTHORITY: u16 = 7001;
    pub(crate) const HUB_OPERATIONS: u16 = 7002;
    pub(crate) const SPOKE: u16 = 7100;
    pub(crate) const SPOKE_OPERATIONS: u16 = 7101;
    pub(crate) const REPLICA: u16 = 7200;
    pub(crate) const REPLICA_OPERATIONS: u16 = 7201;
    pub(crate) const HTTP: u16 = 8080;
    pub(crate) const GATEWAY_OPERATIONS: u16 = 8081;
    pub(crate) const HAPROXY_OPERATIONS: u16 = 8404;
}

/// Name of the load balancer's machine.
pub(crate) const BALANCER: &str = "haproxy";

/// Returns the machine of an etcd member.
pub(crate) fn member(number: usize) -> String {
    format!("etcd-{number}")
}

/// Returns the machine of a hub.
pub(crate) fn hub(number: usize) -> String {
    format!("hub-{number}")
}

/// Returns the machine of a spoke.
pub(crate) fn spoke(region: &str, number: usize) -> String {
    format!("spoke-{}-{number}", region.replace('/', "-"))
}

/// Returns the machine of a replica.
pub(crate) fn replica(region: &str, number: usize) -> String {
    format!("replica-{}-{number}", region.replace('/', "-"))
}

/// Returns the machine of a gateway.
pub(crate) fn gateway(number: usize) -> String {
    format!("gateway-{number}")
}

/// Writer of a fleet's files.
pub(crate) struct FleetFiles<'a> {
    pub(crate) dir: &'a Path,
    pub(crate) network: &'a Network,
}

impl FleetFiles<'_> {
    /// Returns `IP:PORT` of a machine.
    fn at(&self, machine: &str, port: u16) -> String {
        format!("{}:{port}", self.network.address(machine))
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let file = self.dir.join(name);
        fs::write(&file, text).unwrap();
        file
    }

    /// Writes the configuration of a role; returns its specification.
    fn role(&self, role: &str, machine: String, operations: u16, text: &str) -> ProcessSpec {
        let file = self.write(&format!("{machine}.toml"), text);
        ProcessSpec {
            ready: format!("http://{}/readyz", self.at(&machine, operations)),
            arguments: vec![role.to_owned(), "--config".to_owned(), file.display().to_string()],
            name: machine,
        }
    }

    /// Writes the certificates of the etcd members and of the hubs as their clients.
    pub(crate) fn etcd_certificates(&self) {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        self.write("etcd-ca.crt", &params.self_signed(&key).unwrap().pem());
        let issuer = Issuer::new(params, key);
        let sign = |name: &str, subjects: Vec<String>| {
            let key = KeyPair::generate().unwrap();
            let certificate = CertificateParams::new(subjects).unwrap().signed_by(&key, &issuer).unwrap();
            self.write(&format!("{name}.crt"), &certificate.pem());
            self.write(&format!("{name}.key"), &key.serialize_pem());
        };
        for machine in (1..=MEMBERS).map(member) {
            let address = self.network.address(&machine).to_string();
            sign(&machine, vec![host(&machine), address]);
        }
        sign("etcd-client", vec!["hub".to_owned()]);
    }

    /// Returns the specification of an etcd member. Clients and peers need a certificate.
    pub(crate) fn etcd(&self, number: usize) -> ProcessSpec {
        let machine = member(number);
        let url = |machine: &str, port: u16| format!("https://{}:{port}", host(machine));
        let listen = |port: u16| format!("https://{}", self.at(&machine, port));
        let cluster: Vec<_> =
            (1..=MEMBERS).map(member).map(|it| format!("{it}={}", url(&it, port::ETCD_PEER))).collect();
        let operations = format!("http://{}", self.at(&machine, port::ETCD_OPERATIONS));
        let (certificate, key) = (format!("{machine}.crt"), format!("{machine}.key"));
        let options = [
            ("name", machine.clone()),
            ("data-dir", format!("{machine}-data")),
            ("listen-client-urls", listen(port::ETCD_CLIENT)),
            ("advertise-client-urls", url(&machine, port::ETCD_CLIENT)),
            ("listen-peer-urls", listen(port::ETCD_PEER)),
            ("initial-advertise-peer-urls", url(&machine, port::ETCD_PEER)),
            ("initial-cluster", cluster.join(",")),
            ("listen-metrics-urls", operations.clone()),
            ("cert-file", certificate.clone()),
            ("key-file", key.clone()),
            ("client-cert-auth", "true".to_owned()),
            ("trusted-ca-file", "etcd-ca.crt".to_owned()),
            ("peer-cert-file", certificate),
            ("peer-key-file", key),
            ("peer-client-cert-auth", "true".to_owned()),
            ("peer-trusted-ca-file", "etcd-ca.crt".to_owned()),
            ("logger", "zap".to_owned()),
            ("log-level", "warn".to_owned()),
        ];
        let options = options.map(|(name, value)| format!("--{name}={value}"));
        let arguments = ["with-parent", "etcd"].map(str::to_owned).into_iter().chain(options).collect();
        // Responds with 200 if a read that needs a quorum succeeds.
        ProcessSpec { name: machine, arguments, ready: format!("{operations}/health") }
    }

    /// Writes the configuration of a hub. The first one has the folders of `meridian pki init`.
    pub(crate) fn hub(&self, number: usize) -> ProcessSpec {
        let machine = hub(number);
        let listen = |port: u16| self.at(&machine, port);
        let endpoints: Vec<_> = (1..=MEMBERS)
            .map(|number| format!("https://{}:{}", host(&member(number)), port::ETCD_CLIENT))
            .collect();
        let deployments = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/deployments.toml");
        let text = format!(
            "listen = \"{}\"\noperations = \"{}\"\ndeployments = {deployments:?}\n\
             [store]\nkind = \"etcd\"\nendpoints = {endpoints:?}\nca = \"etcd-ca.crt\"\n\
             certificate = \"etcd-client.crt\"\nkey = \"etcd-client.key\"\n\
             [identity]\ndir = \"{}\"\n[authority]\nlisten = \"{}\"\ndir = \"{}\"\n",
            listen(port::HUB),
            listen(port::HUB_OPERATIONS),
            hub_identity(number),
            listen(port::AUTHORITY),
            authority(number),
        );
        self.role("hub", machine.clone(), port::HUB_OPERATIONS, &text)
    }

    /// Writes the configuration of a replica. The engine is scripted: real ones would only share the cores of this machine.
    pub(crate) fn replica(&self, region: &str, number: usize) -> ProcessSpec {
        let machine = replica(region, number);
        let file =
            self.write(&format!("{machine}.toml"), &format!("[identity]\ndir = \"identities/{machine}\"\n"));
        let (file, speed) = (file.display().to_string(), INPUTS_PER_SECOND.to_string());
        let [listen, operations] =
            [port::REPLICA, port::REPLICA_OPERATIONS].map(|port| self.at(&machine, port));
        let options = [
            ("--config", &file),
            ("--listen", &listen),
            ("--operations", &operations),
            ("--inputs-per-second", &speed),
        ];
        let names = if region == REGIONS[0] { &["minilm"][..] } else { &["minilm", "minilm-eu"] };
        let names = names.iter().flat_map(|name| ["--name", name]).map(str::to_owned);
        let options = options.into_iter().flat_map(|(option, value)| [option.to_owned(), value.clone()]);
        let arguments = std::iter::once("scripted-replica".to_owned()).chain(options).chain(names).collect();
        ProcessSpec { name: machine, arguments, ready: format!("http://{operations}/status") }
    }

    /// Writes the configuration of a spoke.
    pub(crate) fn spoke(&self, region: &str, number: usize) -> ProcessSpec {
        let machine = spoke(region, number);
        let replicas: String = (1..=REPLICAS).map(|number| replica_endpoint(region, number)).collect();
        let text = format!(
            "region = \"{region}\"\ninstance = \"spoke-{number}\"\nlisten = \"{}\"\nadvertise = \"{}:{}\"\n\
             operations = \"{}\"\n{}[identity]\ndir = \"identities/{machine}\"\n{replicas}",
            self.at(&machine, port::SPOKE),
            host(&machine),
            port::SPOKE,
            self.at(&machine, port::SPOKE_OPERATIONS),
            hubs(),
        );
        self.role("spoke", machine.clone(), port::SPOKE_OPERATIONS, &text)
    }

    /// Writes the configuration of a gateway.
    pub(crate) fn gateway(&self, number: usize) -> ProcessSpec {
        self.write("key", KEY);
        let tenants = self.write("tenants.toml", "[[tenant]]\nname = \"local\"\nkey_file = \"key\"\n");
        let machine = gateway(number);
        let text = format!(
            "listen = \"{}\"\noperations = \"{}\"\nregion = \"{}\"\n{}tenants = {tenants:?}\n\
             snapshot = \"{machine}-routes\"\ntrusted_peers = [\"{}\"]\n[identity]\ndir = \"identities/{machine}\"\n",
            self.at(&machine, port::HTTP),
            self.at(&machine, port::GATEWAY_OPERATIONS),
            GATEWAY_REGIONS[number - 1],
            hubs(),
            self.network.address(BALANCER),
        );
        self.role("gateway", machine.clone(), port::GATEWAY_OPERATIONS, &text)
    }

    /// Writes the configuration of HAProxy: that of the documentation, and a page with its state.
    pub(crate) fn haproxy(&self) -> ProcessSpec {
        let server =
            |machine: String| format!("{}:{} port {}", host(&machine), port::HTTP, port::GATEWAY_OPERATIONS);
        let gateways = [1, 2].map(gateway).map(server);
        let listen = self.at(BALANCER, port::HTTP);
        let operations = self.at(BALANCER, port::HAPROXY_OPERATIONS);
        let text = haproxy::configuration("HAProxy at layer 7", &listen, &gateways)
            + &format!("\nlisten statistics\n    bind {operations}\n    stats enable\n    stats uri /\n");
        let file = self.write("haproxy.cfg", &text).display().to_string();
        ProcessSpec {
            name: BALANCER.to_owned(),
            arguments: ["with-parent", "haproxy", "-db", "-f", &file].map(str::to_owned).to_vec(),
            ready: format!("http://{operations}/"),
        }
    }
}

/// Returns the line with the URLs of the hubs.
fn hubs() -> String {
    let urls: Vec<_> =
        (1..=HUBS).map(|number| format!("https://{}:{}", host(&hub(number)), port::HUB)).collect();
    format!("hub = {urls:?}\n")
}

/// Returns the table of a replica in the configuration of its spokes.
fn replica_endpoint(region: &str, number: usize) -> String {
    format!("[[replica]]\nendpoint = \"{}:{}\"\n", host(&replica(region, number)), port::REPLICA)
}

/// Returns the identity folder of a hub, relative to the directory of the fleet.
pub(crate) fn hub_identity(number: usize) -> String {
    if number == 1 { "pki/hub".to_owned() } else { format!("identities/{}", hub(number)) }
}

/// Returns the folder of the authority at a hub, relative to the directory of the fleet.
pub(crate) fn authority(number: usize) -> String {
    if number == 1 { "pki/authority".to_owned() } else { format!("authority-{}", hub(number)) }
}
