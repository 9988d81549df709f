//! Devices of this machine, as its driver lists them.

use std::io;
use std::path::Path;

use scheduler_core::scale::devices::Device;

use crate::config::DeviceSelection;

/// Variable that restricts a process to one device.
pub(super) const DEVICE_VARIABLE: &str = "CUDA_VISIBLE_DEVICES";
/// Variable that sets the order of the indexes of devices, and its value: the order of `nvidia-smi`.
pub(super) const DEVICE_ORDER: (&str, &str) = ("CUDA_DEVICE_ORDER", "PCI_BUS_ID");

/// Information of the NVIDIA driver about each GPU that this process can see.
const DRIVER: &str = "proc/driver/nvidia/gpus";
/// Folder of the device files.
const DEVICE_FILES: &str = "dev";

/// Returns the devices of the replicas on the machine with this root folder; `None` if they share all.
///
/// # Errors
///
/// When all devices of the machine are configured and it has none.
pub(super) fn selected(selection: DeviceSelection, root: &Path) -> io::Result<Option<Vec<Device>>> {
    let devices = match selection {
        DeviceSelection::Shared => return Ok(None),
        DeviceSelection::Listed(devices) => devices,
        DeviceSelection::All => detected(root)?,
    };
    if devices.is_empty() {
        let problem = format!(
            "scaling.devices is \"all\", and this machine has no NVIDIA GPU in /{DRIVER} or /{DEVICE_FILES}/nvidia[0-9]*; load the \
             driver, give the process access to the devices (systemd: PrivateDevices=no), or list the devices"
        );
        return Err(io::Error::new(io::ErrorKind::NotFound, problem));
    }
    Ok(Some(devices))
}

fn detected(root: &Path) -> io::Result<Vec<Device>> {
    let mut information = Vec::new();
    for gpu in names(&root.join(DRIVER))? {
        information.push(std::fs::read_to_string(root.join(DRIVER).join(gpu).join("information"))?);
    }
    if !information.is_empty() {
        return Ok(Device::of_driver(information.iter().map(String::as_str)));
    }
    // A container may have the files of the devices only. The numbers of the files are not those of the devices in a process.
    let is_gpu = |name: &String| {
        let number = name.strip_prefix("nvidia").unwrap_or_default();
        !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
    };
    Ok(Device::indexes(names(&root.join(DEVICE_FILES))?.iter().filter(|name| is_gpu(name)).count()))
}

/// Returns the names in a folder, in order; none if it does not exist.
fn names(folder: &Path) -> io::Result<Vec<String>> {
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let names = entries.map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()));
    let mut names = names.collect::<io::Result<Vec<String>>>()?;
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, file: &str, text: &str) {
        let file = root.join(file);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, text).unwrap();
    }

    #[test]
    fn all_devices_are_those_that_the_driver_lists_or_else_the_device_files() {
        let root = tempfile::tempdir().unwrap();
        let all = || {
            let selected = selected(DeviceSelection::All, root.path());
            selected
                .map(|devices| devices.unwrap_or_default().iter().map(Device::to_string).collect::<Vec<_>>())
        };
        let problem = all().unwrap_err().to_string();
        assert!(
            problem.contains("no NVIDIA GPU in /proc/driver/nvidia/gpus or /dev/nvidia[0-9]*"),
            "{problem}"
        );
        for file in ["nvidia3", "nvidia5", "nvidiactl", "nvidia-uvm", "null"] {
            write(root.path(), &format!("dev/{file}"), "");
        }
        assert_eq!(all().unwrap(), ["0", "1"]);
        for (address, uuid) in [("0000:3b:00.0", "GPU-b1"), ("0000:18:00.0", "GPU-a1")] {
            let information = format!("Model:\t X\nGPU UUID: \t {uuid}\n");
            write(root.path(), &format!("proc/driver/nvidia/gpus/{address}/information"), &information);
        }
        assert_eq!(all().unwrap(), ["GPU-a1", "GPU-b1"], "in the order of their addresses");
        assert_eq!(selected(DeviceSelection::Shared, root.path()).unwrap(), None);
        let listed = Device::indexes(1);
        let selected = selected(DeviceSelection::Listed(listed.clone()), root.path());
        assert_eq!(selected.unwrap(), Some(listed));
    }
}
