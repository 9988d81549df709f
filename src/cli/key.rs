//! Command-line options of `meridian key`.

use super::CallerOptions;
use clap::{Args, Subcommand};

#[derive(Debug, Subcommand)]
pub(crate) enum KeyCommand {
    /// Create an API key of a tenant and print it; it is shown only once, and the hub stores only its SHA-256
    Create(CreateKeyOptions),
    /// List the created keys, with owner, creation and expiry; the keys themselves are not stored
    List(KeyHubOptions),
    /// Revoke a key: all gateways with a connection to a hub reject it within two seconds
    Revoke(RevokeKeyOptions),
}

#[derive(Debug, Args)]
pub(crate) struct CreateKeyOptions {
    /// Applied tenant that the key authenticates
    #[arg(long, value_name = "NAME")]
    pub tenant: String,
    /// Name of the key, unique among the keys of the tenant
    #[arg(long, value_name = "TEXT")]
    pub name: Option<String>,
    /// Person or team that receives the key
    #[arg(long, value_name = "TEXT")]
    pub owner: Option<String>,
    /// Time until gateways reject the key, such as 90d; by default it does not expire
    #[arg(long, value_name = "DURATION")]
    pub expires: Option<String>,
    #[command(flatten)]
    pub hub: KeyHubOptions,
}

#[derive(Debug, Args)]
pub(crate) struct RevokeKeyOptions {
    /// Identifier of the key, from `meridian key list`
    #[arg(value_name = "ID")]
    pub id: String,
    #[command(flatten)]
    pub hub: KeyHubOptions,
}

#[derive(Debug, Args)]
pub(crate) struct KeyHubOptions {
    /// Hub, or any of several
    #[arg(long, value_name = "URL", env = "MERIDIAN_HUB", default_value = "http://127.0.0.1:7000")]
    pub hub: String,
    /// Authentication at the hub
    #[command(flatten)]
    pub caller: CallerOptions,
    /// Print JSON to stdout
    #[arg(long)]
    pub json: bool,
}
