//! Configuration of a replica, the reason of a failed start, and the devices of real processes.

use std::os::unix::fs::PermissionsExt;

use rustix::process::{Signal, kill_process};
use tokio::task::JoinHandle;

use super::*;
use crate::config::DeviceSelection;

/// Longer than any step takes.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Program in place of a replica: writes its environment beside its configuration, and then blocks in the shell itself, so that the
/// end of that process leaves none behind.
const PROGRAM: &str =
    "#!/bin/sh\nenv > \"$5.part\"\nmv \"$5.part\" \"$5.env\"\nmkfifo \"$5.$$\"\nread -r line < \"$5.$$\"\n";

fn deployment(name: &str) -> Deployment {
    let text = format!(
        "[[deployment]]\nname = \"{name}\"\ntask = \"embed\"\nmodel = \"m\"\nengine = {{ kind = \"cpu\", precision = \"f32\" }}\n"
    );
    regions::parse_deployments(&text, &regions::Catalogue::builtin()).expect("sound").remove(0)
}

/// Actuator with two devices, and its folder.
struct DeviceTest {
    dir: tempfile::TempDir,
    ports: std::ops::RangeInclusive<u16>,
    targets: watch::Sender<DeploymentTargets>,
    status: watch::Receiver<ActuatorStatus>,
    task: JoinHandle<()>,
}

/// Creates a folder with the program; returns it with five free ports in a row.
fn prepared() -> (tempfile::TempDir, std::ops::RangeInclusive<u16>) {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("program");
    std::fs::write(&program, PROGRAM).unwrap();
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
    let is_free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
    let free = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let first =
        std::iter::repeat_with(free).find(|from| *from < u16::MAX - 5 && (*from..=*from + 4).all(is_free));
    let first = first.unwrap();
    (dir, first..=first + 4)
}

impl DeviceTest {
    /// Starts the actuator in a prepared folder, which wants this number of replicas.
    fn start((dir, ports): (tempfile::TempDir, std::ops::RangeInclusive<u16>), replicas: u32) -> DeviceTest {
        let config = ProcessConfig {
            program: Some(dir.path().join("program")),
            devices: DeviceSelection::Listed(Device::indexes(2)),
            ..ProcessConfig::with_defaults(ports.clone())
        };
        let region = "aws/us-east-1".parse().unwrap();
        let actuator =
            ProcessActuator::new(config, dir.path().to_owned(), region, &Transport::Loopback).unwrap();
        assert_eq!(actuator.replicas_max(), Some(2));
        let (targets, desired) = watch::channel(wanted(replicas, &[]));
        let (running, status) = watch::channel(ActuatorStatus::default());
        let task = tokio::spawn(actuator.run(desired, running));
        DeviceTest { dir, ports, targets, status, task }
    }

    fn files(&self, port: u16) -> ReplicaFiles {
        ReplicaFiles::new(self.dir.path(), port)
    }

    /// Waits until the running replicas are as expected; returns their identifiers.
    async fn running(&mut self, expected: impl Fn(&BTreeSet<ReplicaId>) -> bool) -> BTreeSet<ReplicaId> {
        let ids = |status: &ActuatorStatus| status.replicas.keys().cloned().collect::<BTreeSet<_>>();
        let changed = self.status.wait_for(|status| status.is_initialized && expected(&ids(status)));
        let status = tokio::time::timeout(TIMEOUT, changed).await.expect("the replicas are started").unwrap();
        ids(&status)
    }

    /// Returns the devices in the environments of the running replicas, by port.
    async fn devices(&self) -> BTreeMap<u16, String> {
        let mut devices = BTreeMap::new();
        let ids: Vec<_> = self.status.borrow().replicas.keys().cloned().collect();
        for id in ids {
            let port = port_of(&id);
            let file = self.files(port).config().with_extension("toml.env");
            let begun = Instant::now();
            let environment = loop {
                match std::fs::read_to_string(&file) {
                    Ok(environment) => break environment,
                    Err(error) => assert!(begun.elapsed() < TIMEOUT, "{}: {error}", file.display()),
                }
                tokio::task::yield_now().await;
            };
            let variable = |name: &str| {
                let mut lines = environment.lines();
                lines.find_map(|line| line.strip_prefix(name)?.strip_prefix('=')).map(str::to_owned)
            };
            assert_eq!(variable("CUDA_DEVICE_ORDER").as_deref(), Some("PCI_BUS_ID"));
            devices.insert(port, variable("CUDA_VISIBLE_DEVICES").expect("a device"));
        }
        devices
    }

    /// Stops the actuator, which stops the replicas.
    async fn stop(self) {
        drop(self.targets);
        tokio::time::timeout(TIMEOUT, self.task).await.expect("the replicas end").unwrap();
    }
}

/// Returns the targets of one deployment: its number of replicas, and those to be stopped.
fn wanted(replicas: u32, stop: &[&ReplicaId]) -> DeploymentTargets {
    let deployment = Arc::new(deployment("a"));
    let stop = stop.iter().map(|id| (*id).clone()).collect();
    let name = deployment.name.clone();
    [(name, DeploymentTarget { deployment, replicas, next: None, stop, is_scaled_here: true })].into()
}

/// Returns the port of a replica.
fn port_of(id: &str) -> u16 {
    id.split('-').next().and_then(|port| port.parse().ok()).expect("the port comes first")
}

fn pid_of(id: &str) -> Pid {
    let pid = id.split('-').nth(1).and_then(|pid| pid.parse().ok()).expect("the process id comes second");
    Pid::from_raw(pid).expect("a process id")
}

#[tokio::test]
async fn each_process_has_a_device_of_its_own_and_the_end_of_one_frees_it() {
    let mut test = DeviceTest::start(prepared(), 3);
    let first = test.running(|ids| ids.len() == 2).await;
    let devices = test.devices().await;
    assert!(devices.values().eq(["0", "1"]) || devices.values().eq(["1", "0"]), "{devices:?}");

    // The third one is started when another one has crashed, which is replaced if a device is free.
    let crashed = first.first().unwrap().clone();
    kill_process(pid_of(&crashed), Signal::KILL).unwrap();
    let second = test.running(|ids| ids.len() == 2 && !ids.contains(&crashed)).await;
    let now = test.devices().await;
    let replacement = second.difference(&first).next().unwrap();
    assert_eq!(now[&port_of(replacement)], devices[&port_of(&crashed)]);
    assert_eq!(now.values().collect::<BTreeSet<_>>().len(), 2, "{now:?}");
    assert!(test.status.borrow().replicas.len() == 2, "there is no third device");
    let waiting: Vec<_> = test.status.borrow().waiting.values().cloned().collect();
    assert_eq!(waiting, ["no free device: 2 of 2 in use"]);
    assert!(
        test.status.borrow().ended_starts.values().all(|ended| ended.count == 1),
        "only the crash counts"
    );

    // A replica that is scaled down frees its device when its process has ended.
    let stopped = second.last().unwrap();
    test.targets.send_replace(wanted(1, &[stopped]));
    test.running(|ids| ids.len() == 1 && !ids.contains(stopped)).await;
    assert!(test.status.borrow().waiting.is_empty(), "one is enough");
    test.targets.send_replace(wanted(2, &[]));
    test.running(|ids| ids.len() == 2).await;
    assert_eq!(test.devices().await.values().collect::<BTreeSet<_>>().len(), 2);
    test.stop().await;
}

#[tokio::test]
async fn a_replica_without_a_free_port_counts_as_a_failed_start() {
    let (dir, ports) = prepared();
    // A port of which another process has taken possession meanwhile is not free either.
    let taken: Vec<_> =
        ports.clone().filter_map(|port| TcpListener::bind(("127.0.0.1", port)).ok()).collect();
    let mut test = DeviceTest::start((dir, ports), 1);
    let counted = test.status.wait_for(|status| status.ended_starts.values().any(|ended| ended.count > 0));
    let counted = tokio::time::timeout(TIMEOUT, counted).await.expect("it is counted").unwrap();
    let ended: Vec<_> = counted.ended_starts.values().cloned().collect();
    drop(counted);
    let message = &ended[0].last.failure.message;
    assert!(ended.len() == 1 && message.contains("are in use; widen scaling.ports"), "{message}");
    drop(taken);
    test.stop().await;
}

#[tokio::test]
async fn a_restarted_spoke_adopts_processes_with_their_devices() {
    let (dir, ports) = prepared();
    // A process as an earlier spoke has left it, with the second device.
    let files = ReplicaFiles::new(dir.path(), *ports.start());
    let mut left = std::process::Command::new("/bin/sh")
        .arg(dir.path().join("program"))
        .args(["replica", "--region", "aws/us-east-1", "--config"])
        .arg(files.config())
        .env("CUDA_VISIBLE_DEVICES", "1")
        .env("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        .spawn()
        .unwrap();
    let identity = ProcessStart::read(Pid::from_raw(left.id().cast_signed()).unwrap()).unwrap();
    let device: Device = "1".parse().unwrap();
    files.write(identity, &deployment("a"), Some(&device), None).await.unwrap();
    let has_begun = files.config().with_extension("toml.env");
    let begun = Instant::now();
    while !has_begun.exists() {
        assert!(begun.elapsed() < TIMEOUT);
        tokio::task::yield_now().await;
    }

    let mut test = DeviceTest::start((dir, ports), 3);
    let running = test.running(|ids| ids.len() == 2).await;
    let adopted = format!("{}-{}", test.ports.start(), identity.name());
    assert!(running.contains(&adopted), "{running:?}");
    let devices = test.devices().await;
    assert_eq!(devices[test.ports.start()], "1");
    assert_eq!(devices.values().collect::<BTreeSet<_>>().len(), 2, "{devices:?}");
    // The adopted one ends, and its device is free.
    left.kill().unwrap();
    left.wait().unwrap();
    test.running(|ids| ids.len() == 2 && !ids.contains(&adopted)).await;
    let devices = test.devices().await;
    assert_eq!(devices.values().collect::<BTreeSet<_>>().len(), 2, "{devices:?}");
    test.stop().await;
}

#[test]
fn a_replica_configuration_has_the_deployments_values_and_the_template() {
    let text = "[[deployment]]\nname = \"a\"\ntask = \"embed\"\nmodel = \"/models/\\\"x\\\"\"\nengine = { kind = \"cpu\", precision = \"int8\" }\n";
    let deployment =
        regions::parse_deployments(text, &regions::Catalogue::builtin()).expect("sound").remove(0);
    let region = "aws/us-east-1".parse().expect("a region");
    let config = ProcessConfig {
        template: "[threads]\nengine = 2\n".to_owned(),
        catalogue: Some("/etc/regions.toml".into()),
        ..ProcessConfig::with_defaults(7300..=7399)
    };
    let written =
        |identity| configuration(&deployment, &region, ([127, 0, 0, 1], 7300).into(), &config, identity);
    let (plaintext, text) = (written(None), written(Some(Path::new("/var/lib/identity"))));
    assert!(!plaintext.contains("catalogue") && !plaintext.contains("identity"), "{plaintext}");
    let table: toml::Table = text.parse().expect("TOML");
    assert_eq!(table["listen"].as_str(), Some("127.0.0.1:7300"));
    assert_eq!(table["names"].as_array().map(|names| names[0].as_str()), Some(Some("a")));
    assert_eq!(table["model"].as_str(), Some("/models/\"x\""), "a value cannot break out of its line");
    assert_eq!(table["task"].as_str(), Some("embed"));
    assert_eq!(table["engine"]["precision"].as_str(), Some("int8"));
    assert_eq!(table["threads"]["engine"].as_integer(), Some(2));
    assert_eq!(table["catalogue"].as_str(), Some("/etc/regions.toml"));
    assert_eq!(table["identity"]["dir"].as_str(), Some("/var/lib/identity"));
}

#[tokio::test]
async fn the_reason_of_a_failed_start_has_the_last_lines_of_the_log() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("replica.log");
    assert!(log_end(&log).await.starts_with("its log cannot be read: "));
    std::fs::write(&log, "\n\n").unwrap();
    assert_eq!(log_end(&log).await, "its log is empty");
    std::fs::write(&log, "one\ntwo\n\nthree\u{1b}[0m\nfour\n").unwrap();
    assert_eq!(log_end(&log).await, "two | three [0m | four");
    std::fs::write(&log, "é".repeat(4096)).unwrap();
    assert!(log_end(&log).await.len() <= LOG_END_BYTES as usize + 2, "a character may be cut");
}
