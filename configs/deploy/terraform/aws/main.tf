# One machine in a region of AWS, reachable by the fleet (spoke) and by clients (gateway).

terraform {
  required_providers {
    aws = { source = "hashicorp/aws" }
  }
}

variable "image" {
  type = string
}

variable "subnet" {
  type = string
}

variable "fleet_networks" {
  type = list(string)
}

variable "client_networks" {
  type = list(string)
}

variable "user_data" {
  type      = string
  sensitive = true
}

data "aws_subnet" "this" {
  id = var.subnet
}

resource "aws_security_group" "this" {
  name   = "meridian"
  vpc_id = data.aws_subnet.this.vpc_id

  # Gateways and spokes; clients.
  dynamic "ingress" {
    for_each = {
      "7100" = var.fleet_networks
      "8080" = var.client_networks
    }
    content {
      protocol    = "tcp"
      from_port   = ingress.key
      to_port     = ingress.key
      cidr_blocks = ingress.value
    }
  }

  egress {
    description = "Hub, spokes of other regions, sources of models"
    protocol    = "-1"
    from_port   = 0
    to_port     = 0
    cidr_blocks = ["0.0.0.0/0"]
  }
}

resource "aws_instance" "this" {
  ami                         = var.image
  instance_type               = "c7i.xlarge"
  subnet_id                   = var.subnet
  vpc_security_group_ids      = [aws_security_group.this.id]
  associate_public_ip_address = true
  user_data                   = var.user_data

  # The token of the user data is used once; the metadata service needs a session.
  metadata_options {
    http_tokens = "required"
  }

  root_block_device {
    volume_size = 50
    encrypted   = true
  }
}

output "address" {
  value = aws_instance.this.public_ip
}
