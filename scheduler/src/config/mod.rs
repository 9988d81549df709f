//! Readers of `hub.toml` and `spoke.toml`. Each file is read once and becomes a validated configuration, or a list of
//! all problems.

mod authority;
mod console;
mod hub;
mod kubernetes;
mod operators;
mod scaling;
mod spoke;
mod store;

pub use authority::AuthorityConfig;
pub use console::ConsoleConfig;
pub use hub::{HubConfig, LEASE_TTL};
pub use kubernetes::{KubernetesConfig, WorkloadKind};
pub use operators::{KeySource, OperatorsConfig};
pub use scaling::{ActuatorConfig, DeviceSelection, ProcessConfig, ScalingConfig};
pub use spoke::{ReadSpoke, SpokeConfig};
pub use store::StoreConfig;
