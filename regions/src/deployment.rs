//! Deployments: the model, its engine, the regions that may see its requests, and the regions that should run it.
//!
//! `configs/deployments.toml` is the file that people change most. Two of its keys are easily confused: `residency` is
//! the residency policy (which regions may *see* a request), `regions` is the placement (where the model should *run*).
//! A deployment whose policy permits none of its regions cannot serve any request and is rejected here, before anything
//! starts.

mod read;
pub mod scaling;
pub mod timetable;
mod write;

use std::fmt;
use std::str::FromStr;

pub use read::{parse_deployments, read_deployments, reference};
pub use scaling::Scaling;
pub use write::{UnwritableDeployment, write_deployments};

use configuration::did_you_mean;

use crate::catalogue::Catalogue;
use crate::id::{DeploymentName, RegionId};
use crate::residency::ResidencyPolicy;
use crate::set::RegionSet;

/// Maximum number of deployments in a file: ten times the thousand that routing is measured with.
pub const MAX_DEPLOYMENTS: usize = 10_000;

/// Declares an enum with one text form per variant, in files and on the wire.
macro_rules! named {
    ($(#[$doc:meta])+ $type:ident { $($(#[$variant_doc:meta])+ $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $type { $($(#[$variant_doc])+ $variant),+ }

        impl $type {
            /// All variants.
            pub const ALL: &'static [$type] = &[$($type::$variant),+];

            /// Returns the name in files and on the wire.
            pub fn as_str(self) -> &'static str {
                match self { $($type::$variant => $text),+ }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl FromStr for $type {
            type Err = UnknownName;

            fn from_str(text: &str) -> Result<$type, UnknownName> {
                $type::ALL.iter().copied().find(|known| known.as_str() == text).ok_or_else(|| UnknownName {
                    given: text.chars().take(64).collect(),
                    known: &[$($text),+],
                })
            }
        }
    };
}

/// Error for a name that is not in a closed list.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown `{given}`{}; expected one of {}", did_you_mean(given, known.iter().copied()), known.join(", "))]
pub struct UnknownName {
    /// Given text, cut to a printable length.
    pub given: String,
    /// All known names.
    pub known: &'static [&'static str],
}

named! {
    /// Task of a deployment.
    Task {
        /// Text to vector.
        Embed = "embed",
        /// Query and documents to scores.
        Rerank = "rerank",
        /// Text to labels with scores.
        Classify = "classify",
    }
}

named! {
    /// Kind of engine.
    EngineKind {
        /// Meridian's own engine on the CPU.
        Cpu = "cpu",
        /// NVIDIA's libraries on a GPU, behind `replica/trtllm`.
        TensorrtLlm = "tensorrt-llm",
    }
}

named! {
    /// Number format of the computation.
    Precision {
        /// IEEE 754 binary32.
        F32 = "f32",
        /// 8-bit integers for weights (signed) and for the inputs of matrix products (unsigned); binary32 elsewhere.
        Int8 = "int8",
        /// IEEE 754 binary16.
        F16 = "f16",
        /// The upper half of a binary32.
        Bf16 = "bf16",
        /// 8-bit floating point (E4M3) for matrix products, as calibrated by the tools that built the engine.
        Fp8 = "fp8",
    }
}

impl EngineKind {
    /// Returns the number formats that the engine supports.
    pub fn precisions(self) -> &'static [Precision] {
        match self {
            EngineKind::Cpu => &[Precision::F32, Precision::Int8],
            EngineKind::TensorrtLlm => &[Precision::F32, Precision::F16, Precision::Bf16, Precision::Fp8],
        }
    }
}

/// Maximum tensor parallelism. One: an engine of several ranks needs a process for each, and `mpirun` to start them.
pub const MAX_TENSOR_PARALLEL: i64 = 1;

/// Engine and its number format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EngineSpec {
    /// Kind of engine.
    pub kind: EngineKind,
    /// Number format.
    pub precision: Precision,
}

/// Deployment: a model under the name that clients use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deployment {
    /// Name, which clients send in `model`.
    pub name: DeploymentName,
    /// Task of the model.
    pub task: Task,
    /// Model reference: `pypi://package`, `hf://owner/name`, or a directory.
    pub model: String,
    /// Engine and number format.
    pub engine: EngineSpec,
    /// Regions that may see its requests.
    pub residency: ResidencyPolicy,
    /// Regions in which it should run; empty for every region with a spoke.
    pub regions: Vec<RegionId>,
    /// Number of replicas in each of these regions.
    pub scaling: Scaling,
}

impl Deployment {
    /// Returns the regions in which it should run, without those that are missing in the catalogue.
    pub fn placement(&self, catalogue: &Catalogue) -> RegionSet {
        if self.regions.is_empty() {
            catalogue.all()
        } else {
            self.regions.iter().filter_map(|region| catalogue.index_of(region)).collect()
        }
    }
}
