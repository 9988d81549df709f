//! Tasks, engines and number formats: closed lists of names, in files and on the wire.

use std::fmt;
use std::str::FromStr;

use configuration::did_you_mean;

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

/// Error for a name that is not in the list of permitted ones.
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

/// Engine and its number format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EngineSpec {
    /// Kind of engine.
    pub kind: EngineKind,
    /// Number format.
    pub precision: Precision,
}
