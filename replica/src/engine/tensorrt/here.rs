//! What this machine and this program have: the GPUs and the libraries' versions.

use std::fs;
use std::path::Path;

/// Where NVIDIA's driver describes its GPUs, a folder for each; containers see it as well.
pub const DRIVER: &str = "/proc/driver/nvidia/gpus";

/// The GPU of the stand-in.
pub const STAND_IN: &str = "stand-in";

/// What this machine and this program have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Here {
    /// The names of the GPUs, each once.
    pub gpus: Vec<String>,
    /// The version of TensorRT that is loaded.
    pub tensorrt: String,
    /// The version of TensorRT-LLM that this was compiled against.
    pub tensorrt_llm: String,
    /// Whether both are our stand-in.
    pub stand_in: bool,
}

/// The names of the GPUs that the driver describes below `driver`, each once. No driver, no names.
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
    fn gpus_are_those_that_the_driver_describes() {
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
