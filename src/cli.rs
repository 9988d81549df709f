//! Command-line options.

mod console;
mod embed;
mod get;
mod jobs;
mod key;
mod load;
mod log;
mod model;
mod pki;
mod requests;

pub(crate) use console::ConsoleOptions;
pub(crate) use embed::{EmbedCommandOptions, InputFormatOption};
pub(crate) use get::{GetOptions, GetUsageOptions, ResourceKind};
pub(crate) use jobs::{GetJobsOptions, GetListOptions, StatusOption};
pub(crate) use key::{CreateKeyOptions, KeyCommand, KeyHubOptions, RevokeKeyOptions};
pub(crate) use load::{CompareOptions, LoadCommand, LoadOptions};
pub(crate) use log::LogOptions;
pub(crate) use model::{BuildOptions, CheckOptions, ModelCommand};
pub(crate) use pki::{
    BackupOptions, InitOptions, IssueOptions, MemberOptions, PkiCommand, RestoreOptions, RevokeOptions,
    RotateOptions, TokenOptions,
};
pub(crate) use requests::GetRequestsOptions;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand, ValueEnum};
use std::ffi::OsString;
use std::path::PathBuf;

/// Global endpoint for embedding and reranking models in many regions of many clouds.
#[derive(Debug, Parser)]
#[command(name = "meridian", version = env!("MERIDIAN_VERSION"), propagate_version = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub command: CliCommand,
}

impl Cli {
    /// Reads the command line of this process. Prints help, the version, or a usage error and exits, where it has no command.
    pub(crate) fn read() -> Cli {
        Cli::try_read(std::env::args_os()).unwrap_or_else(|error| error.exit())
    }

    fn try_read(
        arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    ) -> Result<Cli, clap::Error> {
        let mut command = Cli::command();
        let given = command.try_get_matches_from_mut(arguments)?;
        let cli = Cli::from_arg_matches(&given).map_err(|error| error.format(&mut command))?;
        if let (CliCommand::Get(options), Some((name, given))) = (&cli.command, given.subcommand())
            && let Some(problem) = get::foreign_options(options.resource, given)
        {
            let command = command.find_subcommand_mut(name).expect("the given command exists");
            return Err(command.error(ErrorKind::ArgumentConflict, problem));
        }
        Ok(cli)
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum CliCommand {
    /// Start a local fleet: a hub, regions with emulated distances, and a gateway
    Up(UpOptions),
    /// Run a gateway: the edge proxy that clients connect to
    Gateway(GatewayOptions),
    /// Run a hub: the control plane that publishes the route table
    Hub(RoleOptions),
    /// Run a spoke: the ingress, agent and scaler of a region
    Spoke(SpokeOptions),
    /// Run a replica: a model server
    Replica(ReplicaOptions),
    /// Validate configuration files and report all problems; starts no process and opens no socket
    Check(CheckFilesOptions),
    /// Fetch models into the local cache, list them, build and verify their engines
    #[command(subcommand)]
    Model(ModelCommand),
    /// Apply files of deployments and tenants to the fleet
    Apply(ApplyOptions),
    /// Show deployments, tenants, regions, the traffic plan, rollouts, jobs or usage
    Get(GetOptions),
    /// Explain the routing decision of a request
    Explain(ExplainOptions),
    /// Print a link that opens the console of a hub in a browser
    Console(ConsoleOptions),
    /// Create, list and revoke API keys of tenants
    #[command(subcommand)]
    Key(KeyCommand),
    /// Manage the built-in certificate authority: join tokens, certificates, revocation, rotation
    #[command(subcommand)]
    Pki(PkiCommand),
    /// Back up a hub: its store, the authority, its identity, and optionally receipts
    Backup(BackupOptions),
    /// Restore a hub from a backup, and begin a new epoch
    Restore(RestoreOptions),
    /// Drain a region: move its traffic to other allowed regions
    Drain(DrainOptions),
    /// Audit receipts: verify that every request stayed in its allowed regions
    VerifyResidency(VerifyOptions),
    /// Generate load on an endpoint; report latencies, errors and serving regions
    Load(Box<LoadOptions>),
    /// Embed the texts of a file into a file of vectors, with a local engine or an endpoint; an interrupted run continues
    Embed(Box<EmbedCommandOptions>),
    /// Run a drill: inject faults at given times and verify the expected behaviour
    Drill(DrillOptions),
    /// Find batch settings for a model on this machine; replicas load them automatically
    Tune(TuneOptions),
    /// Request a health path of a process on this machine; exit code 1 unless it responds with 200. For container health checks
    Health(HealthOptions),
    /// Show the filter of the log of a running process, or change it for a time
    Log(LogOptions),
    /// Write the shell completions and man pages of this program, for packages
    #[command(hide = true)]
    Generate(GenerateOptions),
    /// Execute another program that ends with the process that started this one; used by `up` to start an etcd
    #[command(hide = true)]
    WithParent(ExecOptions),
    /// Run a replica with simulated computation, for drills
    #[command(hide = true)]
    ScriptedReplica(ScriptedReplicaOptions),
}

#[derive(Debug, Args)]
pub(crate) struct ExecOptions {
    /// Program
    pub program: String,
    /// Its arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub arguments: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct ScriptedReplicaOptions {
    /// Listen address
    #[arg(long)]
    pub listen: std::net::SocketAddr,
    /// Throughput to report
    #[arg(long)]
    pub inputs_per_second: u32,
    /// Name of a deployment that it serves
    #[arg(long = "name", required = true)]
    pub names: Vec<String>,
    /// Configuration file with `catalogue` and `[identity]`; plaintext if absent
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Joining
    #[command(flatten)]
    pub join: JoinOptions,
    /// Plaintext address for operators: `GET /status` and `POST /slow`
    #[arg(long)]
    pub operations: std::net::SocketAddr,
}

/// Options with which a process joins the fleet.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct JoinOptions {
    /// Join the fleet with this token of `meridian pki token`, unless the identity folder has a valid certificate
    #[arg(long = "join", value_name = "TOKEN", env = "MERIDIAN_JOIN_TOKEN", hide_env_values = true)]
    pub token: Option<String>,
    /// File with the token, instead of the token itself; it is read only by a process that must join
    #[arg(long = "join-file", value_name = "FILE", conflicts_with = "token")]
    pub file: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct HealthOptions {
    /// URL of a health path: `/livez` or `/readyz` of the operations port, `/health` of a replica
    #[arg(value_name = "URL", env = "MERIDIAN_HEALTH_URL")]
    pub url: String,
}

#[derive(Debug, Args)]
pub(crate) struct GenerateOptions {
    /// Directory to create: completions/ and man/
    #[arg(long, value_name = "DIR")]
    pub dir: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct DrillOptions {
    /// Drill file, such as those under configs/drills
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Validate the file and report its problems, without running the drill
    #[arg(long)]
    pub check: bool,
    /// Print JSON to stdout instead of the timeline
    #[arg(long)]
    pub json: bool,
    /// Write a self-contained HTML report with plots to this file
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Run against this deployment, with the actions that are possible there (surge, drain), instead of a local fleet
    #[arg(long, value_name = "URL")]
    pub against: Option<String>,
    /// API key for that deployment
    #[arg(long, env = "MERIDIAN_KEY", hide_env_values = true, default_value = "local")]
    pub key: String,
    /// Hub of that deployment, for drains
    #[arg(long, value_name = "URL", env = "MERIDIAN_HUB")]
    pub hub: Option<String>,
    /// Authentication at the hub
    #[command(flatten)]
    pub caller: CallerOptions,
    /// Keep configurations and logs of the local fleet in this directory; by default they are deleted
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct GatewayOptions {
    /// Configuration file
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
    /// Take over the sockets of the running gateway with the same configuration (`handover`); that gateway finishes its
    /// requests and exits. Without a running gateway, start normally. Without this option, fail if a gateway is running
    #[arg(long)]
    pub take_over: bool,
    /// Joining
    #[command(flatten)]
    pub join: JoinOptions,
}

#[derive(Debug, Args)]
pub(crate) struct RoleOptions {
    /// Configuration file
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
    /// Joining
    #[command(flatten)]
    pub join: JoinOptions,
}

#[derive(Debug, Args)]
pub(crate) struct SpokeOptions {
    /// Configuration file
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
    /// Region of this process, as cloud/region
    #[arg(long, value_name = "REGION")]
    pub region: Option<String>,
    /// Joining
    #[command(flatten)]
    pub join: JoinOptions,
}

#[derive(Debug, Args)]
pub(crate) struct ReplicaOptions {
    /// Configuration file
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
    /// Region of this process, as cloud/region
    #[arg(long, value_name = "REGION")]
    pub region: Option<String>,
    /// Joining
    #[command(flatten)]
    pub join: JoinOptions,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct UpOptions {
    /// Number of regions, or a list such as aws/us-east-1,gcp/europe-west4
    #[arg(long, value_name = "N|LIST", default_value = "3")]
    pub regions: String,
    /// Number of gateways: near the first region, the second, and so on; by default near each, and one with --ipv6
    #[arg(long, value_name = "N")]
    pub gateways: Option<u32>,
    /// Port of the first gateway on loopback; 0 selects a free port. The others have free ports
    #[arg(long, default_value_t = 8080)]
    pub port: u16,
    /// API key of clients
    #[arg(long, default_value = "local")]
    pub key: String,
    /// Serve clients over TLS, with a generated certificate whose path is printed at the ready line
    #[arg(long)]
    pub tls: bool,
    /// Store of the hub: an embedded file, or an etcd cluster of three members that is started for it
    #[arg(long, value_enum, default_value_t = StoreKind::Embedded)]
    pub store: StoreKind,
    /// Use the IPv6 loopback address for all connections, instead of the IPv4 one
    #[arg(long)]
    pub ipv6: bool,
    /// Number of hubs; more than one needs --store etcd
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub hubs: u32,
    /// Number of spokes in each region, which serve the same replicas
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub spokes: u32,
    /// Deployments file; by default all-MiniLM-L6-v2 everywhere, and once restricted to the EU. Replicas of deployments
    /// with `scaling` are started and stopped by the spokes
    #[arg(long, value_name = "FILE")]
    pub deployments: Option<PathBuf>,
    /// Catalogue of clouds and regions; by default the built-in one
    #[arg(long, value_name = "FILE")]
    pub catalogue: Option<PathBuf>,
    /// Directory of the drills that the console lists and starts; by default those of the repository
    #[arg(long, value_name = "DIR")]
    pub drills: Option<PathBuf>,
    /// Directory for configurations, logs and state; by default in the user's state directory
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

/// Store of a local fleet's hub.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum StoreKind {
    Embedded,
    Etcd,
}

#[derive(Debug, Args)]
pub(crate) struct CheckFilesOptions {
    /// Files of any kind: role configuration, deployments, tenants, catalogue, drills
    #[arg(value_name = "FILE", num_args = 1.., required = true)]
    pub files: Vec<PathBuf>,
    /// Catalogue for validating deployments, tenants and drills; by default one among the files, or the built-in one
    #[arg(long, value_name = "FILE")]
    pub regions: Option<PathBuf>,
    /// Also validate the environment as a role does at start: the variables that the files name must be set, and those of the log valid
    #[arg(long)]
    pub environment: bool,
    /// Name the kind of each valid file
    #[arg(long, short)]
    pub verbose: bool,
}

/// Options with which an operator or viewer authenticates: a certificate, or a token of an identity provider.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct CallerOptions {
    /// Directory with the identity of an operator or viewer; not needed with a token, or for a hub without an identity on this
    /// machine
    #[arg(long, value_name = "DIR", env = "MERIDIAN_IDENTITY")]
    pub identity: Option<PathBuf>,
    /// File with a token of the identity provider of the hub, instead of an identity; by default the variable MERIDIAN_TOKEN,
    /// if set
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// The token itself; a command line is visible to other users, so only the variable is meant for it
    #[arg(long, value_name = "TOKEN", env = "MERIDIAN_TOKEN", hide_env_values = true, hide = true)]
    pub token: Option<String>,
    /// Certificates of the authorities of the fleet (`authorities.pem` of any identity), with which the hub is verified before
    /// it receives a token
    #[arg(long, value_name = "FILE", env = "MERIDIAN_AUTHORITIES")]
    pub authorities: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct ApplyOptions {
    /// Files of [[deployment]], files of [[tenant]], or both. The files of a kind replace all entries of that kind: entries
    /// that are in none of them are removed. A kind without a file is not changed
    #[arg(value_name = "FILE", num_args = 1.., required_unless_present = "promote")]
    pub files: Vec<PathBuf>,
    /// Keep traffic on the current model of each deployment whose model changes, until --promote
    #[arg(long, conflicts_with = "promote")]
    pub hold: bool,
    /// Switch this deployment to its next model as soon as the new replicas are ready
    #[arg(long, value_name = "NAME", conflicts_with_all = ["files", "dry_run"])]
    pub promote: Option<String>,
    /// Hub, or any of several
    #[arg(long, value_name = "URL", env = "MERIDIAN_HUB", default_value = "http://127.0.0.1:7000")]
    pub hub: String,
    /// Authentication at the hub
    #[command(flatten)]
    pub caller: CallerOptions,
    /// Show the changes without applying them
    #[arg(long)]
    pub dry_run: bool,
    /// Apply without confirmation
    #[arg(long)]
    pub yes: bool,
    /// Wait until the changed deployments are ready in each of their regions; of no change, all. Exit status 1 with the
    /// reason as soon as a region cannot start one
    #[arg(long, conflicts_with_all = ["hold", "promote", "dry_run"])]
    pub wait: bool,
    /// Time limit of --wait, as 90s or 10m
    #[arg(long, value_name = "DURATION", default_value = "10m", requires = "wait")]
    pub wait_timeout: String,
    /// Print JSON to stdout
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ExplainOptions {
    /// Request id, from the response header x-request-id
    #[arg(value_name = "REQUEST_ID")]
    pub id: String,
    /// Operations port of the gateway that served the request
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8081")]
    pub gateway: String,
    /// Print the gateway's JSON to stdout
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DrainOptions {
    /// Region, as cloud/region
    #[arg(value_name = "REGION")]
    pub region: String,
    /// End the drain
    #[arg(long)]
    pub undo: bool,
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

#[derive(Debug, Args)]
pub(crate) struct VerifyOptions {
    /// Directories of receipts: those of gateways, and those of spokes to confirm them
    #[arg(long, value_name = "DIR", num_args = 1.., required = true)]
    pub receipts: Vec<PathBuf>,
    /// Catalogue for the residency policies; by default the built-in one
    #[arg(long, value_name = "FILE")]
    pub regions: Option<PathBuf>,
    /// Head hash that was recorded elsewhere and must occur in a chain; may be repeated
    #[arg(long = "head", value_name = "HASH")]
    pub heads: Vec<String>,
    /// Id of a receipt that must be present; may be repeated
    #[arg(long = "receipt", value_name = "ID")]
    pub receipt_ids: Vec<String>,
    /// Accept chains that begin after their first file, because earlier files are archived elsewhere
    #[arg(long)]
    pub partial: bool,
    /// Audit only requests of this tenant: its name, with --pseudonym-key-file, or else its pseudonym
    #[arg(long, value_name = "TENANT")]
    pub tenant: Option<String>,
    /// Key of the tenants' pseudonyms, as configured at the gateways
    #[arg(long, value_name = "FILE", requires = "tenant")]
    pub pseudonym_key_file: Option<PathBuf>,
    /// Audit only requests of this deployment
    #[arg(long, value_name = "NAME")]
    pub deployment: Option<String>,
    /// Audit only requests from this time on, as 2026-03-01T00:00:00Z or in milliseconds since 1970
    #[arg(long, value_name = "TIME")]
    pub from: Option<String>,
    /// Audit only requests before this time
    #[arg(long, value_name = "TIME")]
    pub until: Option<String>,
    /// Signed checkpoint of the chains' heads: compared with the chains, and updated if they are intact
    #[arg(long, value_name = "FILE", requires = "checkpoint_key_file")]
    pub checkpoint: Option<PathBuf>,
    /// The auditor's signing key for the checkpoint: 16 bytes or more, unknown to the audited party
    #[arg(long, value_name = "FILE", requires = "checkpoint")]
    pub checkpoint_key_file: Option<PathBuf>,
    /// Create the checkpoint if it does not exist
    #[arg(long, requires = "checkpoint")]
    pub init_checkpoint: bool,
    /// Minimum age of a receipt, relative to the newest, before a missing counterpart is reported; for chains in use
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    pub settle: u64,
    /// Print JSON to stdout
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct TuneOptions {
    /// Model reference as in a replica's configuration; fetched if it is not in the cache
    #[arg(long, value_name = "SOURCE")]
    pub model: String,
    /// Precisions to try; those with insufficient accuracy are skipped
    #[arg(long, value_name = "LIST", default_value = "f32,int8")]
    pub precision: String,
    /// Target p99 latency of a single request while bulk requests are running
    #[arg(long, value_name = "N")]
    pub target_p99_ms: Option<u64>,
    /// Duration of the measurement in seconds
    #[arg(long, default_value_t = replica::tune::SECONDS)]
    pub seconds: u64,
    /// Print JSON to stdout
    #[arg(long)]
    pub json: bool,
    /// Write the settings, and a plot next to them, to this file; by default to the model cache, where replicas find them
    #[arg(long, value_name = "FILE")]
    pub out: Option<std::path::PathBuf>,
    /// Write the plot to this file; also if the settings are not kept because other processes use the machine
    #[arg(long, value_name = "FILE")]
    pub plot: Option<std::path::PathBuf>,
    /// Keep the settings although other processes use the machine; the file then says so
    #[arg(long)]
    pub keep: bool,
}
