//! Deployments: what is served, with which engine, and where it may and should run.
//!
//! `configs/deployments.toml` is the file that people change most. Two of its keys sound alike and are not: `residency` is
//! the residency policy (which regions may *see* a request), `regions` is placement (where the model should *run*). A deployment whose
//! policy permits none of its places can answer nobody and is refused here, before anything starts.

mod read;
pub mod scaling;
pub mod timetable;
mod write;

use std::fmt;
use std::str::FromStr;

pub use read::parse_deployments;
pub use scaling::Scaling;
pub use write::{NoWords, write_deployments};

use crate::catalogue::Catalogue;
use crate::id::{DeploymentName, RegionId};
use crate::residency::ResidencyPolicy;
use crate::set::RegionSet;
use crate::suggest::did_you_mean;

/// How many deployments one file may hold: ten times the thousand that routing is measured with.
pub const MAX_DEPLOYMENTS: usize = 10_000;

/// Declares an enum whose variants have one name each, in files and on the wire.
macro_rules! named {
    ($(#[$doc:meta])+ $type:ident { $($(#[$variant_doc:meta])+ $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $type { $($(#[$variant_doc])+ $variant),+ }

        impl $type {
            /// Every one there is.
            pub const ALL: &'static [$type] = &[$($type::$variant),+];

            /// The name in files and on the wire.
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

/// A name that is not one of a closed list.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown `{given}`{}; there is {}", did_you_mean(given, known.iter().copied()), known.join(", "))]
pub struct UnknownName {
    /// What was given, cut to a printable length.
    pub given: String,
    /// Every name there is.
    pub known: &'static [&'static str],
}

named! {
    /// What a deployment does with a text.
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
    /// What runs the model.
    EngineKind {
        /// Meridian's own engine on the CPU.
        Cpu = "cpu",
        /// NVIDIA's libraries on a GPU, behind `replica/trtllm`.
        TensorrtLlm = "tensorrt-llm",
    }
}

named! {
    /// The number format that the model computes in.
    Precision {
        /// IEEE 754 binary32.
        F32 = "f32",
        /// Signed bytes for weights and unsigned ones for what goes into products; the rest in binary32.
        Int8 = "int8",
        /// IEEE 754 binary16.
        F16 = "f16",
        /// The upper half of a binary32.
        Bf16 = "bf16",
        /// Eight bits of floating point for products (E4M3), as the tools that built the engine calibrated it.
        Fp8 = "fp8",
    }
}

impl EngineKind {
    /// What it computes in.
    pub fn precisions(self) -> &'static [Precision] {
        match self {
            EngineKind::Cpu => &[Precision::F32, Precision::Int8],
            EngineKind::TensorrtLlm => &[Precision::F32, Precision::F16, Precision::Bf16, Precision::Fp8],
        }
    }
}

/// GPUs that one engine may be cut over. One: an engine of several ranks needs a process for each, and `mpirun` to start them.
pub const MAX_TENSOR_PARALLEL: i64 = 1;

/// An engine and how it is to be run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EngineSpec {
    /// What runs the model.
    pub kind: EngineKind,
    /// The number format that it computes in.
    pub precision: Precision,
}

/// One deployment: a model under the name that clients use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deployment {
    /// What clients put in `model`.
    pub name: DeploymentName,
    /// What it does.
    pub task: Task,
    /// Where the model comes from: `pypi://package`, `hf://owner/name`, or a directory.
    pub model: String,
    /// What runs it.
    pub engine: EngineSpec,
    /// Which regions may see its requests.
    pub residency: ResidencyPolicy,
    /// Where it should run; empty is wherever there is a spoke.
    pub regions: Vec<RegionId>,
    /// How many replicas it should have in each of them.
    pub scaling: Scaling,
}

impl Deployment {
    /// Where it should run, as a set. A region that this catalogue does not know is not in it.
    pub fn placed(&self, catalogue: &Catalogue) -> RegionSet {
        if self.regions.is_empty() {
            catalogue.all()
        } else {
            self.regions.iter().filter_map(|region| catalogue.index_of(region)).collect()
        }
    }
}
