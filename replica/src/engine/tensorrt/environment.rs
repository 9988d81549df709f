//! GPUs and library versions of this machine and this program.

use std::fs;
use std::path::Path;

/// Directory of NVIDIA's driver with a subdirectory for each GPU; visible in containers as well.
pub const DRIVER: &str = "/proc/driver/nvidia/gpus";

/// GPU name of the test double.
pub const TEST_DOUBLE: &str = "stand-in";

/// GPUs and libraries of this machine and this program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineEnvironment {
    /// Names of the GPUs, each once.
    pub gpus: Vec<String>,
    /// Version of the loaded TensorRT library.
    pub tensorrt: String,
    /// Version of TensorRT-LLM at compile time.
    pub tensorrt_llm: String,
    /// Whether both are the test double.
    pub test_double: bool,
}

/// Returns the names of the GPUs in the driver's directory `driver`, each once; empty without a driver.
pub fn gpus(driver: &Path) -> Vec<String> {
    let folders = fs::read_dir(driver).into_iter().flatten().flatten();
    let mut names: Vec<String> = folders
        .filter_map(|folder| {
            let text = fs::read_to_string(folder.path().join("information")).ok()?;
            let model = text.lines().find_map(|line| line.strip_prefix("Model:"))?;
            Some(model.trim().to_owned())
        })
        .collect();
    names.sort();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_read_from_the_driver() {
        let folder = tempfile::tempdir().unwrap();
        for (bus, name) in
            [("0000:18:00.0", "NVIDIA H200"), ("0000:2a:00.0", "NVIDIA H200"), ("0000:3a:00.0", "NVIDIA L4")]
        {
            let gpu = folder.path().join(bus);
            fs::create_dir(&gpu).unwrap();
            fs::write(gpu.join("information"), format!("Model: \t\t {name}\nIRQ:   \t\t 34\n")).unwrap();
        }
        assert_eq!(gpus(folder.path()), ["NVIDIA H200", "NVIDIA L4"]);
        assert!(gpus(&folder.path().join("none")).is_empty());
    }
}
