//! Devices of replica processes on one machine: each replica has a device of its own.
//!
//! A device is what `CUDA_VISIBLE_DEVICES` names. Without it every replica on a machine with several GPUs uses the first one:
//! they share its memory, and the others are idle. So the number of devices limits the number of replicas, and a replica that
//! finds no free device is not started.
//!
//! A device is held from the start of a process until its end, not until its drain, because a process keeps its memory while it
//! finishes its requests. A restarted spoke adopts running processes with the devices in their records. A record without a device
//! is that of a replica that was started before devices were configured: it uses the first device of the machine.
//!
//! The alternative, to set the device in each replica's configuration, is what the drivers' own variable already does for every
//! engine.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

/// Maximum length of a device's name: that of a MIG device, with a reserve.
const DEVICE_LEN_MAX: usize = 96;
/// Line of a driver's information file with the unique name of a GPU.
const UUID_LINE: &str = "GPU UUID:";

/// Device, as in `CUDA_VISIBLE_DEVICES`: an index such as `0`, or a unique name such as `GPU-5f2a…` or `MIG-…`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Device(String);

impl Device {
    /// Returns the device as a string.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the devices of a machine with these information files of the NVIDIA driver, in the order of their PCI addresses: the
    /// unique names of the GPUs, and their indexes if one of them has none.
    pub fn of_driver<'a>(information: impl ExactSizeIterator<Item = &'a str> + Clone) -> Vec<Device> {
        let uuid = |text: &str| {
            let name = text.lines().find_map(|line| line.trim().strip_prefix(UUID_LINE))?.trim();
            name.starts_with("GPU-").then(|| name.parse().ok()).flatten()
        };
        let named: Option<Vec<Device>> = information.clone().map(uuid).collect();
        named.unwrap_or_else(|| Device::indexes(information.len()))
    }

    /// Returns the devices of a machine with this number of GPUs.
    pub fn indexes(count: usize) -> Vec<Device> {
        (0..count).map(|index| Device(index.to_string())).collect()
    }
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Device, String> {
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'/');
        let is_index = text.bytes().all(|byte| byte.is_ascii_digit());
        let is_name =
            ["GPU-", "MIG-"].iter().any(|prefix| text.starts_with(prefix)) && text.bytes().all(is_allowed);
        if text.is_empty() || text.len() > DEVICE_LEN_MAX || !(is_index || is_name) {
            let shown: String = text.chars().take(64).collect();
            return Err(format!(
                "{shown:?} is not a device; write an index such as \"0\", or \"GPU-…\" as in `nvidia-smi -L`"
            ));
        }
        Ok(Device(text.to_owned()))
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// All devices are held by replicas; the number of devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DevicesInUse(pub usize);

/// Devices and the replicas that hold them. `K` identifies a running replica.
#[derive(Clone, Debug)]
pub struct DeviceAssignment<K> {
    /// `None`: replicas share all devices of the machine.
    devices: Option<Vec<Device>>,
    holders: BTreeMap<K, Device>,
}

impl<K: Ord> DeviceAssignment<K> {
    /// Creates an assignment of these devices, of which none is held; `None` if replicas share all devices of the machine.
    pub fn new(devices: Option<Vec<Device>>) -> DeviceAssignment<K> {
        DeviceAssignment { devices, holders: BTreeMap::new() }
    }

    /// Returns the device for the next replica, the first free one; `None` if replicas share all.
    ///
    /// # Errors
    ///
    /// When all devices are held.
    pub fn free(&self) -> Result<Option<&Device>, DevicesInUse> {
        let Some(devices) = &self.devices else { return Ok(None) };
        let is_free = |device: &&Device| !self.holders.values().any(|held| held == *device);
        devices.iter().find(is_free).map(Some).ok_or(DevicesInUse(devices.len()))
    }

    /// Records that a replica holds a device: a [free](DeviceAssignment::free) one at its start, or that of its record at its
    /// adoption. The device of a record may no longer be configured; then it limits no other replica.
    pub fn hold(&mut self, replica: K, device: Device) {
        self.holders.insert(replica, device);
    }

    /// Records the adoption of a replica without a device in its record. It counts at the first device that no other replica holds;
    /// the replicas whose devices are known are to be adopted first.
    pub fn hold_unknown(&mut self, replica: K) {
        if let Ok(Some(device)) = self.free() {
            let device = device.clone();
            self.hold(replica, device);
        }
    }

    /// Frees the device of a replica whose process has ended.
    pub fn release(&mut self, replica: &K) {
        self.holders.remove(replica);
    }

    /// Returns the device of a replica.
    pub fn of(&self, replica: &K) -> Option<&Device> {
        self.holders.get(replica)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// Replicas by port, as the actuator has them.
    type Assignment = DeviceAssignment<u16>;

    fn device(name: &str) -> Device {
        name.parse().unwrap()
    }

    /// Starts a replica at a port; returns its device.
    fn start(assignment: &mut Assignment, port: u16) -> Result<String, DevicesInUse> {
        let device = assignment.free()?.unwrap().clone();
        assignment.hold(port, device.clone());
        Ok(device.to_string())
    }

    #[test]
    fn each_replica_has_a_device_of_its_own_and_no_more_start_than_there_are_devices() {
        let mut assignment = Assignment::new(Some(Device::indexes(2)));
        assert_eq!(start(&mut assignment, 7300), Ok("0".to_owned()));
        assert_eq!(start(&mut assignment, 7301), Ok("1".to_owned()));
        assert_eq!(start(&mut assignment, 7302), Err(DevicesInUse(2)));
        assert_eq!(assignment.of(&7302), None);
        assignment.release(&7300);
        assert_eq!(start(&mut assignment, 7302), Ok("0".to_owned()), "freed by the end of its process");
        assignment.release(&7300);
        assert_eq!(start(&mut assignment, 7303), Err(DevicesInUse(2)), "a process ends once");
    }

    #[test]
    fn a_restarted_spoke_adopts_replicas_with_their_devices() {
        let mut assignment = Assignment::new(Some(Device::indexes(3)));
        assignment.hold(7301, device("0"));
        assignment.hold(7300, device("2"));
        assert_eq!(start(&mut assignment, 7302), Ok("1".to_owned()));
        assert_eq!(start(&mut assignment, 7303), Err(DevicesInUse(3)));
        assert_eq!(assignment.of(&7300), Some(&device("2")));
        // A device that is no longer configured is not given to another replica, and limits none.
        let mut fewer = Assignment::new(Some(Device::indexes(1)));
        fewer.hold(7300, device("2"));
        assert_eq!(start(&mut fewer, 7301), Ok("0".to_owned()));
        fewer.release(&7300);
        assert_eq!(start(&mut fewer, 7302), Err(DevicesInUse(1)));
    }

    #[test]
    fn a_replica_without_a_recorded_device_counts_at_the_first_one_that_no_other_holds() {
        let mut assignment = Assignment::new(Some(Device::indexes(2)));
        assignment.hold(7301, device("0"));
        assignment.hold_unknown(7300);
        assert_eq!(start(&mut assignment, 7302), Err(DevicesInUse(2)));
        assignment.hold_unknown(7303);
        assert_eq!(assignment.of(&7303), None, "more of them than devices");
        assignment.release(&7300);
        assert_eq!(start(&mut assignment, 7302), Ok("1".to_owned()));
    }

    #[test]
    fn without_devices_replicas_share_all_of_the_machine() {
        let mut assignment = Assignment::new(None);
        assignment.hold_unknown(7300);
        assert_eq!((assignment.free(), assignment.of(&7300)), (Ok(None), None));
    }

    #[test]
    fn the_devices_of_a_machine_are_those_of_its_driver() {
        let information = |uuid: &str| {
            format!("Model: \t\t NVIDIA H100\nIRQ:   \t\t 18\nGPU UUID: \t {uuid}\nDevice Minor: \t 0\n")
        };
        let devices = |texts: &[String]| {
            let devices = Device::of_driver(texts.iter().map(String::as_str));
            devices.iter().map(Device::to_string).collect::<Vec<_>>()
        };
        let uuids = ["GPU-3c1fd0b6-0000-1111-2222-333344445555", "GPU-0a1fd0b6-0000-1111-2222-333344445555"];
        assert_eq!(devices(&uuids.map(information)), uuids);
        // The driver has not read it yet.
        assert_eq!(
            devices(&[information(uuids[0]), information("GPU-????????-????-????-????-????????????")]),
            ["0", "1"]
        );
        assert_eq!(devices(&["Model: x\n".to_owned()]), ["0"]);
        assert!(devices(&[]).is_empty());
    }

    #[test]
    fn a_device_is_an_index_or_a_unique_name() {
        for name in ["0", "15", "GPU-3c1fd0b6-0000", "MIG-3c1fd0b6-0000", "MIG-GPU-3c1fd0b6/1/0"] {
            assert_eq!(device(name).as_str(), name);
        }
        for name in [
            "",
            "0,1",
            "-1",
            "all",
            "GPU 0",
            "cuda:0",
            "GPU-0,GPU-1",
            "GPU-0\n",
            &"1".repeat(DEVICE_LEN_MAX + 1),
        ] {
            let problem = name.parse::<Device>().expect_err(name);
            assert!(problem.contains("is not a device; write an index such as"), "{problem}");
        }
        assert!("1".repeat(DEVICE_LEN_MAX).parse::<Device>().is_ok());
    }

    proptest! {
        /// For any sequence of starts, ends and adoptions, no device has two replicas, and none is free while a replica is refused one.
        #[test]
        fn no_device_is_held_twice(count in 1..5usize, steps in prop::collection::vec((0..8u16, 0..3u8), 0..40)) {
            let mut assignment = Assignment::new(Some(Device::indexes(count)));
            let mut running: BTreeMap<u16, String> = BTreeMap::new();
            for (port, step) in steps {
                match step {
                    0 if !running.contains_key(&port) => match start(&mut assignment, port) {
                        Ok(device) => drop(running.insert(port, device)),
                        Err(in_use) => prop_assert_eq!((in_use, running.len()), (DevicesInUse(count), count)),
                    },
                    1 => {
                        running.remove(&port);
                        assignment.release(&port);
                    }
                    // The spoke restarts.
                    2 => {
                        assignment = Assignment::new(Some(Device::indexes(count)));
                        running.iter().for_each(|(port, name)| assignment.hold(*port, device(name)));
                    }
                    _ => {}
                }
                let distinct: BTreeSet<_> = running.values().collect();
                prop_assert_eq!(distinct.len(), running.len());
                for (port, name) in &running {
                    prop_assert_eq!(assignment.of(port).map(Device::as_str), Some(name.as_str()));
                }
            }
        }
    }
}
